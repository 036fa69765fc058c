"""When an agent loop's context is replaced, and the messages that the next one begins with."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyrl_fast.config import GeneratorConfig
from skyrl_fast.rollout.chat_messages import normalize_messages, with_text
from skyrl_fast.rollout.env.errors import EnvError
from skyrl_fast.rollout.env.protocol import Message
from skyrl_fast.system.importing import load_setting_function

SETTING = "generator.compaction.policy"
SUMMARY_HEADING = "Summary of the conversation so far:"
_END_OF_THOUGHTS = re.compile(r"</think(?:ing)?>|◁/think▷")

# Gets the context's messages and its number of tokens; returns a request for a summary, the
# messages of a new context, or None to go on.
CompactionPolicy = Callable[[Sequence[Message], int], Any]


def load_compaction_policy(name: str | None) -> CompactionPolicy | None:
    """Return the function of `generator.compaction.policy`; ValueError if there is none."""
    policy: CompactionPolicy | None = load_setting_function(SETTING, name)
    return policy


class Compaction:
    """Decides what becomes of a context that grows: by its budget, or by the user's function."""

    def __init__(self, config: GeneratorConfig) -> None:
        self._budget = config.compaction_budget
        self._request = config.compaction.request
        self._max_summaries = config.compaction.max_summaries
        self._policy = load_compaction_policy(config.compaction.policy)

    async def decide(
        self, messages: Sequence[Message], num_tokens: int, *, num_summaries: int
    ) -> str | list[Message] | None:
        """Return a request for a summary, the messages of a new context, or None to go on.

        Args:
            messages: of the context so far, the observation that the next turn answers included.
            num_tokens: length of the next turn's prompt.
            num_summaries: that the trajectory has already.

        Raises:
            EnvError: the user's function raised, or returned something else.
        """
        if self._policy is None:
            wanted: Any = self._request if num_tokens > self._budget else None
        else:
            wanted = await self._ask(self._policy, messages, num_tokens)
        if isinstance(wanted, str) and num_summaries == self._max_summaries:
            return None
        return wanted

    async def _ask(
        self, policy: CompactionPolicy, messages: Sequence[Message], num_tokens: int
    ) -> str | list[Message] | None:
        try:
            wanted = policy(copy.deepcopy(messages), num_tokens)
            if inspect.isawaitable(wanted):
                wanted = await wanted
        except Exception as error:  # by any class of a user
            raise EnvError(f"{SETTING}: {type(error).__name__}: {error}") from error
        if wanted is None or isinstance(wanted, str):
            return wanted
        is_list = isinstance(wanted, Sequence) and bool(wanted)
        if not is_list or not all(isinstance(message, Mapping) for message in wanted):
            raise EnvError(
                f"{SETTING}: expected a request for a summary (text), messages or None, got "
                f"{wanted!r:.100}"
            )
        try:
            return normalize_messages(wanted)
        except ValueError as error:
            raise EnvError(f"{SETTING}: {error}") from error


def messages_after(first: Sequence[Message], summary: str) -> list[Message]:
    """Return the messages of the context that a summary begins.

    Args:
        first: those of the trajectory's first prompt.
        summary: the model's answer; its thoughts are left out.
    """
    words = _END_OF_THOUGHTS.split(summary)[-1].strip()
    return with_text(first, f"{SUMMARY_HEADING}\n{words}")
