"""Supervised fine-tuning on demonstrations, by the trainer of reinforcement learning."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skyrl_fast.batch import batch_from_trajectories
from skyrl_fast.batch.segments import segment_sums
from skyrl_fast.config import AlgorithmConfig, Config, ConfigSource, as_config
from skyrl_fast.config.asynchronous import FullyAsyncConfig
from skyrl_fast.config.settings import CriticConfig
from skyrl_fast.rollout.activity import ActivityBoard
from skyrl_fast.rollout.chat_messages import Message, template_kwargs_of
from skyrl_fast.rollout.loop_settings import loop_settings
from skyrl_fast.rollout.stop_reason import STOP
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.train.callbacks import Callback
from skyrl_fast.train.data.demonstrations import build_demonstration, chat_of, first_answer
from skyrl_fast.train.data.prompts import Prompt, PromptSource, read_rows, rows_from
from skyrl_fast.train.model.loading import load_tokenizer
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.output.result import TrainResult
from skyrl_fast.train.output.summary import show_summary
from skyrl_fast.train.run import RunRequest, run_request
from skyrl_fast.train.setup.errors import SetupError, with_short_errors
from skyrl_fast.train.setup.given_objects import GivenObjects
from skyrl_fast.train.setup.run_data import EVAL_UID

# Columns of the progress display, where the settings choose none. The loss is the cross-entropy.
SHOWN = (
    "cross_entropy",
    "eval",
    "step_seconds",
    "tokens_per_second",
    "entropy",
    "grad_norm",
    "learning_rate",
)


@with_short_errors
def sft(
    config: ConfigSource,
    *,
    demonstrations: PromptSource | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Train a model on demonstrations; all output is written to the run folder, a summary to
    standard error.

    Each assistant message is a step, with the prompt that the agent loop would make for it: so
    `trainer.rows` and `trainer.row_layout` mean the same as in reinforcement learning. The loss is
    the mean cross-entropy of the answers' tokens, end tokens included. Checkpoints are
    model folders in Hugging Face format.

    Settings of data, model, optimizer, rows, checkpoints and loggers apply; the algorithm, the
    engine and the environment are not used. `trainer.train_batch_size` counts demonstrations. With
    `data.val_data` the evaluation reports the mean log-probability of a demonstration's answer
    tokens, averaged over the demonstrations.

    Args:
        config: as for `train_agent`. `data.train_data` are files or data sets on the hub.
        demonstrations: rows instead of `data.train_data`: in a list, a `datasets.Dataset` or a
            table of pandas, polars or pyarrow; see `chat_of`.
        callbacks: called after steps, evaluations and checkpoints.

    Raises:
        ConfigError, RunInUseError, CheckpointError, CallbackError: as for `train_agent`.
        SetupError: a demonstration is invalid or too long, or a model is missing.

    Example:
        >>> sft(
        ...     {"trainer.policy.model.path": "Qwen/Qwen2.5-0.5B"},
        ...     demonstrations=[{"prompt": "2 + 2?", "completion": "4"}] * 64,
        ... ).step
        1
    """
    result = sft_by_settings(config, demonstrations=demonstrations, callbacks=callbacks)
    show_summary(result)
    return result


def sft_by_settings(
    config: ConfigSource,
    *,
    demonstrations: PromptSource | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Train as `sft` does, and leave the summary to the caller."""
    config = _settings(as_config(config))
    data = config.data
    try:
        if demonstrations is None:
            rows = [row for path in data.train_data for row in read_rows(path, "train")]
        else:
            rows = [*rows_from(demonstrations, "train", "demonstrations")]
        held_out = [row for path in data.val_data for row in read_rows(path, "test")]
        chats = [_chat(row, where) for where, row in rows]
        held_out_chats = [_chat(row, where) for where, row in held_out]
    except ValueError as error:
        raise SetupError(str(error)) from error
    numbered = {str(number): chat for number, chat in enumerate(chats)}
    numbered |= {f"{EVAL_UID}{number}": chat for number, chat in enumerate(held_out_chats)}
    maker = _DemonstrationMaker(numbered)
    request = RunRequest(
        prompts=[chat.row for chat in chats],
        eval_prompts=[chat.row for chat in held_out_chats] or None,
        callbacks=callbacks,
        make_rollouts=maker,
        check_rollouts=maker.check,
    )
    return run_request(config, GivenObjects("train_agent"), request)


def _settings(config: Config) -> Config:
    if config.policies:
        raise SetupError(
            "trainer.policy.model.lora.policies: expected none for demonstrations, which are of "
            f"one policy, got {', '.join(config.policies)}"
        )
    # A demonstration is a trajectory whose answers are trained by likelihood: no sampling, no
    # reference, no routes, no advantage that the loss would read.
    algorithm = AlgorithmConfig(policy_loss_type="cross_entropy", advantage_estimator="reinforce++")
    policy = replace(config.trainer.policy, moe_enable_routing_replay=False)
    generator = replace(
        config.generator,
        n_samples_per_prompt=1,
        eval_n_samples_per_prompt=1,
        sampling_params=replace(config.generator.sampling_params, temperature=1.0),
    )
    trainer = replace(
        config.trainer,
        algorithm=algorithm,
        policy=policy,
        critic=CriticConfig(),
        dump_trajectories=False,
        fully_async=FullyAsyncConfig(),
        placement=replace(config.trainer.placement, colocate_all=True),
        progress=config.trainer.progress or [*SHOWN],
    )
    return replace(config, trainer=trainer, generator=generator)


@dataclass(frozen=True, slots=True)
class _Chat:
    """A demonstration: its location, messages, and the row's arguments of the chat template."""

    where: str
    messages: list[Message]
    template_kwargs: dict[str, Any]
    data_source: Any = None

    @property
    def row(self) -> dict[str, Any]:
        """The row by which the run knows it; a resumed run must have the same."""
        more: dict[str, Any] = {}
        if self.template_kwargs:
            more["chat_template_kwargs"] = self.template_kwargs
        if self.data_source is not None:
            more["data_source"] = self.data_source
        prompt = self.messages[: first_answer(self.messages)]
        return {"prompt": prompt, "demonstration": self.messages, **more}


def _chat(row: Any, where: str) -> _Chat:
    messages = chat_of(row, where)
    if not isinstance(row, Mapping):
        return _Chat(where, messages, {})
    try:
        return _Chat(where, messages, template_kwargs_of(row), row.get("data_source"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


class _DemonstrationMaker:
    """Makes the `Demonstrations` of chats, which are known by uid.

    Rows that the chat template refuses are found before a model is loaded.
    """

    def __init__(self, chats: Mapping[str, _Chat]) -> None:
        self._chats = chats
        self._steps: dict[str, list[Step]] = {}

    def check(self, config: Config, model_path: str) -> None:
        """Tokenize all chats; raise ValueError, which names the row, for one that is invalid."""
        # Kept for the run, so that every chat is tokenized once.
        self._steps = self._tokenize(config, load_tokenizer(model_path))

    async def __call__(self, config: Config, tokenizer: Any, model_path: str) -> Demonstrations:
        return Demonstrations(self._steps or self._tokenize(config, tokenizer))

    def _tokenize(self, config: Config, tokenizer: Any) -> dict[str, list[Step]]:
        generator = loop_settings(config)
        result: dict[str, list[Step]] = {}
        for uid, chat in self._chats.items():
            result[uid] = build_demonstration(
                chat.messages,
                tokenizer,
                generator,
                chat.where,
                template_kwargs=chat.template_kwargs,
            )
        return result


class Demonstrations:
    """The `Rollouts` of supervised fine-tuning: nothing is sampled."""

    def __init__(self, steps: Mapping[str, list[Step]]) -> None:
        self.board = ActivityBoard()
        self._steps = steps
        self._policy: Policy | None = None

    async def generate(
        self, prompts: Sequence[Prompt], *, step: int, phase: str
    ) -> list[Trajectory]:
        trajectories = [self._trajectory(prompt, phase) for prompt in prompts]
        if phase == "eval":
            await asyncio.to_thread(self._score, trajectories)
        return trajectories

    def _trajectory(self, prompt: Prompt, phase: str) -> Trajectory:
        return Trajectory(
            uid=prompt.uid,
            repetition_id=0,
            # Copies: `_score` writes rewards, and a prompt comes again in the next epoch.
            steps=[replace(step) for step in self._steps[prompt.uid]],
            stop_reason=STOP,
            env_class="demonstration",
            env_metrics={},
            seconds=0.0,
            phase=phase,
            data_source=prompt.data_source,
        )

    def _score(self, trajectories: Sequence[Trajectory]) -> None:
        assert self._policy is not None
        batch = batch_from_trajectories(trajectories)
        values = self._policy.batch_logprobs(batch).double().numpy()
        cu = batch.cu_responses.numpy()
        mask = batch.loss_mask.numpy()
        # The reward of an evaluation is the mean log-probability of all trained tokens of a chat.
        sums = segment_sums(values, cu, float)
        counts = segment_sums(mask, cu, int)
        row = 0
        for trajectory in trajectories:
            rows = slice(row, row + len(trajectory.steps))
            trajectory.steps[-1].reward = float(sums[rows].sum() / counts[rows].sum())
            row = rows.stop

    async def sleep(self, policy: Policy) -> None:
        """Do nothing: there is no engine."""

    async def update_weights(self, policy: Policy, *, version: int) -> dict[str, float]:
        self._policy = policy
        return {}

    async def wait_for_fault(self) -> None:
        await asyncio.Event().wait()

    async def repair(self, policy: Policy | None, *, version: int) -> None:
        """Do nothing."""

    def activity(self, uids: Sequence[str]) -> list[str]:
        return []

    def faults(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        """Do nothing."""
