"""The contexts of a trajectory, and what each of an agent's calls was for.

A context begins with a call that continues no earlier one, or whose prompt has fewer tokens than
that of the call it continues, as some of it was dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from skyrl_fast.rollout.trajectory import ACT, OTHER, SUMMARISE, Step, Trajectory

MIN_SHARED = 16  # characters without white space of an answer that is found again elsewhere
_TAG = re.compile(r"</?\w+>")  # around thoughts and parts of answers, which agents take apart


def context_numbers(trajectory: Trajectory) -> list[int]:
    """Return the number of each step's context, from 0 in the order of their first calls.

    Among the steps of one of several policies, or of a role, a call that continues another's is
    compared with the latest of its own.
    """
    known: dict[int, tuple[int, int]] = {}  # by step: its context and the length of its prompt
    result: list[int] = []
    num_contexts = 0
    for index, step in enumerate(trajectory.steps):
        if step.number is None:  # not recorded: one conversation in time order
            number = index
            parent: int | None = index - 1
        else:
            number = step.number
            parent = step.parent
        length = len(step.prompt_token_ids)
        context = None
        if parent is not None and parent not in known and known:
            parent = next(reversed(known))
        if parent in known:
            parent_context, parent_length = known[parent]
            if length >= parent_length:
                context = parent_context
        if context is None:
            context = num_contexts
            num_contexts += 1
        known[number] = (context, length)
        result.append(context)
    return result


def name_calls(trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> None:
    """Set the kind of each of an agent's calls, which its answers show once they are used.

    A summary is the last call of its context, or one about another context, whose answer is a part
    of the prompt that begins a later one. A call is another one if it is the only one of its
    context and nothing that comes later shows its answer.

    Args:
        decode: returns the text of tokens.
    """
    steps = trajectory.steps
    contexts = context_numbers(trajectory)
    if max(contexts, default=0) == 0:
        return
    last_calls = {context: index for index, context in enumerate(contexts)}
    begun = {contexts[0]}
    # What each call saw anew: of one that begins a context, all of its prompt.
    shown = [_squeeze(step.state or "") for step in steps]
    for index, context in enumerate(contexts):
        if context in begun:
            continue
        begun.add(context)
        shown[index] = _squeeze(decode(steps[index].prompt_token_ids))
        for before in reversed(range(index)):
            step = steps[before]
            own_context = contexts[before]
            is_last = last_calls[own_context] == before
            is_used = is_last and _shows(shown[index], step)
            if is_used and _has_history(steps, before, decode):
                step.kind = SUMMARISE
                break
    for context, index in last_calls.items():
        step = steps[index]
        is_alone = contexts.count(context) == 1
        later = shown[index + 1 :]
        if not is_alone or not later or step.kind != ACT:
            continue
        is_used = any(_shows(text, step) for text in later)
        if not is_used:
            step.kind = OTHER


def _has_history(steps: Sequence[Step], index: int, decode: Callable[[Sequence[int]], str]) -> bool:
    """Return whether a call's prompt has an earlier answer, as its own or as a text."""
    if steps[index].parent is not None:
        return True
    prompt = _squeeze(decode(steps[index].prompt_token_ids))
    earlier = steps[:index]
    return any(_shows(prompt, step) for step in earlier)


def _shows(text: str, step: Step) -> bool:
    """Return whether a text without white space has a part of the step's answer."""
    for part in _TAG.split(step.text):
        words = _squeeze(part)
        if len(words) >= MIN_SHARED and words in text:
            return True
    return False


def _squeeze(text: str) -> str:
    return "".join(text.split())
