"""Settings of an agent loop that replaces its context by a summary."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_fast.setting import setting

SUMMARY_REQUEST = (
    "The conversation has become too long and will be cleared. Write a summary from which you can "
    "go on without it: what was asked for, what is done, all facts that are still needed, and what "
    "comes next. Answer with the summary alone."
)


@dataclass(slots=True)
class CompactionConfig:
    """When `generator.context=compact` replaces the context, and by what."""

    budget: int | None = setting(
        None,
        "longest prompt, in tokens, before the model is asked for a summary; null: three quarters "
        "of max_input_length",
        at_least=1,
    )
    request: str = setting(
        SUMMARY_REQUEST, "message that asks for the summary, at the end of the context"
    )
    max_summaries: int | None = setting(
        None,
        "maximum summaries of a trajectory; the context of the last grows up to max_input_length. "
        "null: no limit",
        at_least=0,
    )
    policy: str | None = setting(
        None,
        "module:function or file.py:function in place of the budget: called before each turn but a "
        "context's first with its messages and number of tokens, returns a request for a summary "
        "(text), the messages of a new context, or None to go on",
    )
