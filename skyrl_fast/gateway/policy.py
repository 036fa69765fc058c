"""What all sessions of a run share: the policy, and how it may be called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from skyrl_fast.config import GeneratorConfig
from skyrl_fast.config.settings import REFERENCE
from skyrl_fast.config.upstream import Upstream
from skyrl_fast.gateway.form_compiler import FormCompiler
from skyrl_fast.gateway.messages import ApiError
from skyrl_fast.rollout.activity import ActivityBoard
from skyrl_fast.rollout.answer_parser import AnswerParser
from skyrl_fast.rollout.chat_template import ChatTemplate
from skyrl_fast.rollout.policy_calls import PolicyCalls
from skyrl_fast.rollout.reasoning import ReasoningParser
from skyrl_fast.rollout.tool_calls import ToolCallParser


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """What all sessions of a run share.

    Args:
        template: template of the model, whose prompts have at most `max_input_length` tokens.
        model: name under which the policy is called; of several the first.
        untrained_models: names whose calls are sampled from the policy, but not trained; with
            several policies from the model without an adapter.
        upstreams: by name, models whose calls are forwarded to another server.
        one_line: whether a trajectory's calls must follow each other, for estimators per turn.
        takes_rewards: whether rewards may be posted. Code that a model writes can have the key.
        warned: warnings that the log has already.
        answer_parser: runs both parsers, in processes that all sessions share.
    """

    calls: PolicyCalls
    config: GeneratorConfig
    template: ChatTemplate
    board: ActivityBoard
    model: str
    untrained_models: tuple[str, ...] = ()
    upstreams: Mapping[str, Upstream] = field(default_factory=dict)
    tool_parser: ToolCallParser | None = None
    reasoning_parser: ReasoningParser | None = None
    one_line: bool = False
    takes_rewards: bool = True
    warned: set[str] = field(default_factory=set)
    answer_parser: AnswerParser = field(init=False)
    forms: FormCompiler = field(init=False)

    def __post_init__(self) -> None:
        parser = AnswerParser(self.tool_parser, self.reasoning_parser)
        object.__setattr__(self, "answer_parser", parser)  # the class is frozen
        object.__setattr__(self, "forms", FormCompiler(self.template.tokenizer))

    @property
    def trained(self) -> tuple[str, ...]:
        return self.calls.policies or (self.model,)

    @property
    def sampled(self) -> tuple[str, ...]:
        return (*(self.calls.sampled or (self.model,)), *self.untrained_models)

    def find_policy(self, name: str) -> str | None:
        """Return the policy or role that answers calls of a name, as `PolicyCalls` takes it."""
        if not self.calls.policies:
            return None
        if name in self.calls.policies:
            return name
        if self.calls.are_roles:
            return None
        return REFERENCE

    def check_model(self, name: str) -> None:
        if name not in self.sampled:
            known = ", ".join([*self.sampled, *self.upstreams])
            raise ApiError(
                404,
                f"The model `{name}` does not exist here; known: {known}",
                code="model_not_found",
            )
