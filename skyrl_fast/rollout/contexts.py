"""The contexts of a trajectory, and what each of an agent's calls was for.

A context begins with a call that continues no earlier one, or whose prompt has fewer tokens than
that of the call it continues, as some of it was dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

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


def name_calls(
    trajectory: Trajectory,
    decode: Callable[[Sequence[int]], str],
    *,
    acted: Collection[int] = (),
) -> None:
    """Set the kind of each of an agent's calls, which its answers show once they are used.

    A summary is a call whose answer the prompt that begins a later context has in place of earlier
    ones. A call is another one if it is the only one of its context and nothing that comes later
    shows its answer.

    Args:
        decode: returns the text of tokens.
        acted: numbers of the steps whose tool calls have had results, which are no summaries.
    """
    steps = trajectory.steps
    contexts = context_numbers(trajectory)
    if max(contexts, default=0) == 0:
        return
    calls = _Calls(steps, contexts, decode, acted)
    begun = {contexts[0]}
    first_calls = {0}
    for index, context in enumerate(contexts):
        if context in begun:
            continue
        begun.add(context)
        first_calls.add(index)
        summary = calls.find_summary(index)
        if summary is not None:
            steps[summary].kind = SUMMARISE
    last = len(steps) - 1
    for index, context in enumerate(contexts):
        is_alone = contexts.count(context) == 1
        may_be_other = is_alone and index != last and steps[index].kind == ACT
        if may_be_other and not calls.is_used(index, first_calls):
            steps[index].kind = OTHER


class _Calls:
    """An agent's calls, and what their prompts show of earlier answers."""

    def __init__(
        self,
        steps: Sequence[Step],
        contexts: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        acted: Collection[int],
    ) -> None:
        self._steps = steps
        self._contexts = contexts
        self._decode = decode
        self._acted = acted
        self._last_calls = {context: index for index, context in enumerate(contexts)}
        self._continued = {step.parent for step in steps if step.parent is not None}
        self._parts = [_parts(step) for step in steps]
        self._prompts: dict[int, str] = {}

    def find_summary(self, begin: int) -> int | None:
        """Return the index of the call whose answer stands for what the prompt leaves out.

        Args:
            begin: index of the first call of a context.
        """
        prompt = self._prompt(begin)
        places = {}
        for index in range(begin):
            place = _find(prompt, self._parts[index])
            if place is not None:
                places[index] = place
        # A client may keep the last answers: the summary comes before them. What was sampled
        # without a history, a plan or a title, and earlier summaries may stand anywhere.
        for index in sorted(places, key=lambda index: (places[index], -index)):
            if self._steps[index].kind == SUMMARISE or not self._has_history(index):
                continue
            if self._has_ended(index, begin) and self._replaces(index, prompt):
                return index
            return None
        return None

    def is_used(self, index: int, first_calls: Collection[int]) -> bool:
        """Return whether a later call shows the answer of a call that is alone in its context.

        Words that its own prompt has, too, such as the task in a title, are no sign of use in the
        prompt of another conversation.
        """
        parts = self._parts[index]
        own = [part for part in parts if part not in self._prompt(index)]
        for later in range(index + 1, len(self._steps)):
            if later in first_calls:
                is_shown = _find(self._prompt(later), own) is not None
            else:
                shown = _squeeze(self._steps[later].state or "")
                is_shown = _find(shown, parts) is not None
            if is_shown:
                return True
        return False

    def _has_ended(self, index: int, begin: int) -> bool:
        """Return whether a call may have ended a conversation that another context replaces."""
        number = self._steps[index].number
        if number in self._acted or number in self._continued:
            return False
        context = self._contexts[index]
        return self._last_calls[context] < begin

    def _has_history(self, index: int) -> bool:
        """Return whether a call's prompt has an earlier answer, as an answer or in the text."""
        if self._steps[index].parent is not None:
            return True
        own = self._prompt(index)
        earlier = self._parts[:index]
        return any(_find(own, parts) is not None for parts in earlier)

    def _replaces(self, index: int, prompt: str) -> bool:
        """Return whether a prompt leaves out an earlier answer that a call's own prompt has."""
        own = self._prompt(index)
        rest = prompt  # without the call's answer, which may repeat an earlier one
        for part in self._parts[index]:
            rest = rest.replace(part, "")
        is_known = False
        for parts in self._parts[:index]:
            known = [part for part in parts if part in own]
            if not known:
                continue
            is_known = True
            # All of its parts: thoughts may be left out of an answer that stays.
            stays = [part for part in known if rest.count(part) >= own.count(part)]
            if not stays:
                return True
        # Of answers of a few characters nothing tells whether they were left out.
        return not is_known and self._steps[index].parent is not None

    def _prompt(self, index: int) -> str:
        """Return the text of a prompt without white space."""
        text = self._prompts.get(index)
        if text is None:
            step = self._steps[index]
            text = _squeeze(self._decode(step.prompt_token_ids))
            self._prompts[index] = text
        return text


def _parts(step: Step) -> list[str]:
    """Return the parts of an answer between tags, without white space, but for short ones."""
    parts = []
    for text in _TAG.split(step.text):
        part = _squeeze(text)
        if len(part) >= MIN_SHARED:
            parts.append(part)
    return parts


def _find(text: str, parts: Sequence[str]) -> int | None:
    """Return where a text without white space has the first of these parts; None: it has none."""
    places = []
    for part in parts:
        place = text.find(part)
        if place >= 0:
            places.append(place)
    return min(places, default=None)


def _squeeze(text: str) -> str:
    return "".join(text.split())
