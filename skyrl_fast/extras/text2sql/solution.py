"""Find the SQL in what a model wrote, in time linear in its length.

The regular expressions of skyrl_gym's judge are quadratic in the number of opening tags and hold
the interpreter's lock meanwhile: 29,000 of them take 84 seconds.
"""

from __future__ import annotations

import re

_FORBIDDEN = re.compile(r"</?(think|sql|observation)\b", re.IGNORECASE)  # in a solution
_OBSERVATION_END = re.compile(r"</observation>", re.IGNORECASE)
_SPACE = re.compile(r"\s*")
_THINK = "<think>"


def first_between(text: str, start: str, end: str) -> str | None:
    """Return what stands between the first `start` and the next `end`; None: nothing does.

    Example:
        >>> first_between("<sql>SELECT 1</sql>", "<sql>", "</sql>")
        'SELECT 1'
    """
    _, found, rest = text.partition(start)
    inside, closed, _ = rest.partition(end)
    return inside if found and closed else None


def solution_sql(history: str) -> str | None:
    """Return the solution of a conversation, or None if its format is wrong.

    The answer is that of skyrl_gym's `verify_format_and_extract`: there is one solution, without
    tags inside; somewhere stands a thought, and one begins after each observation.

    Example:
        >>> solution_sql("<think>easy</think><solution>SELECT 1</solution>")
        'SELECT 1'
    """
    before, found, rest = history.partition("<solution>")
    solution, closed, after = rest.partition("</solution>")
    if not found or not closed or "<solution>" in rest or "</solution>" in after:
        return None
    if _FORBIDDEN.search(solution) or first_between(history, _THINK, "</think>") is None:
        return None
    for match in _OBSERVATION_END.finditer(before):
        start = _SPACE.match(before, match.end()).end()  # type: ignore[union-attr]
        # lower() of the tag's characters only: some letters outside ASCII become ASCII.
        if not before[start : start + len(_THINK)].lower().startswith(_THINK):
            return None
    return solution.strip()
