"""Settings of the agent loop, and what it asks of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyrl_fast.rollout.context import CONTEXTS
from skyrl_fast.rollout.engine import SamplingParams

PHASES = ("train", "eval")


class RolloutPrompt(Protocol):
    """One task: what a prompt must have to be rolled out."""

    @property
    def uid(self) -> str:
        """Name of its group."""

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The first prompt as chat messages."""

    @property
    def env_class(self) -> str:
        """Name of its environment in skyrl_gym."""

    @property
    def env_extras(self) -> Mapping[str, Any]:
        """What the environment's constructor gets as `extras`."""

    @property
    def data_source(self) -> str | None:
        """Name of the data set, or None."""


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """Settings of the agent loop.

    Args:
        n_samples_per_prompt: trajectories of one group in training.
        eval_n_samples_per_prompt: the same in evaluation.
        max_turns: most steps of one trajectory.
        max_input_length: no step has a longer prompt.
        sampling_params: of training.
        eval_sampling_params: of evaluation; None: as in training.
        context: "append", "retemplate" or "single"; see `make_context`.
        append_eos_after_stop_string: a response that a stop string ended gets an end token, which
            is not trained.
        chat_template: in place of the tokenizer's own.
        chat_template_kwargs: passed to the chat template.
        max_concurrent_trajectories: agent loops at once.
        trajectory_timeout_seconds: deadline of one trajectory, further attempts included.
        max_retries: further attempts after an environment or the engine failed.
    """

    n_samples_per_prompt: int = 1
    eval_n_samples_per_prompt: int = 1
    max_turns: int = 1
    max_input_length: int = 512
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    eval_sampling_params: SamplingParams | None = None
    context: str = "append"
    append_eos_after_stop_string: bool = True
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_concurrent_trajectories: int = 256
    trajectory_timeout_seconds: float = 300.0
    max_retries: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in (
            "n_samples_per_prompt",
            "eval_n_samples_per_prompt",
            "max_turns",
            "max_input_length",
            "max_concurrent_trajectories",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"RolloutConfig: {name}: wanted >= 1, got {getattr(self, name)}")
        if self.context not in CONTEXTS:
            raise ValueError(
                f"RolloutConfig: context: wanted one of {CONTEXTS}, got {self.context!r}"
            )
        if self.trajectory_timeout_seconds <= 0 or self.max_retries < 0:
            raise ValueError(
                "RolloutConfig: wanted trajectory_timeout_seconds > 0 and max_retries >= 0, got "
                f"{self.trajectory_timeout_seconds} and {self.max_retries}"
            )

    def samples(self, phase: str) -> int:
        """Trajectories per prompt in this phase."""
        return self.n_samples_per_prompt if phase == "train" else self.eval_n_samples_per_prompt

    def sampling(self, phase: str) -> SamplingParams:
        """Sampling parameters of this phase."""
        own = self.eval_sampling_params if phase == "eval" else None
        return self.sampling_params if own is None else own
