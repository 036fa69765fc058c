"""Supervised fine-tuning on demonstrations, by the trainer of reinforcement learning."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from skyrl_fast.batch import batch_from_trajectories
from skyrl_fast.batch.segments import segment_sums
from skyrl_fast.config import Config, ConfigSource, as_config
from skyrl_fast.rollout.activity import ActivityBoard
from skyrl_fast.rollout.context import ContextError, Message
from skyrl_fast.rollout.loop_settings import loop_settings
from skyrl_fast.rollout.stop_reason import STOP
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.train.callbacks import Callback
from skyrl_fast.train.data.demonstrations import chat_of, demonstrated_steps, first_answer
from skyrl_fast.train.data.prompts import Prompt, placed_rows
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.run import TrainResult, train
from skyrl_fast.train.setup.errors import SetupError
from skyrl_fast.train.setup.run_data import EVAL_UID


def sft(
    config: ConfigSource,
    *,
    demonstrations: Iterable[Any] | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Train a model on demonstrations; all output is written to the run folder.

    Each assistant message is a step, with the prompt that the agent loop would make for it: so
    rows, merged rows and prefix trees (`trainer.rows`) are those of reinforcement learning. The
    loss is the mean cross-entropy of the answers' tokens, end tokens included. Checkpoints are
    model folders in Hugging Face format.

    Settings of data, model, optimizer, rows, checkpoints and loggers apply; the algorithm, the
    engine and the environment are not used. `trainer.train_batch_size` counts demonstrations. With
    `data.val_data` the evaluation reports the mean log-probability of the answers' tokens.

    Args:
        config: as for `train`. `data.train_data` are files or data sets on the hub.
        demonstrations: rows in memory instead of `data.train_data`; see `chat_of`.
        callbacks: called after steps, evaluations and checkpoints.

    Raises:
        ConfigError, RunInUseError, CheckpointError, CallbackError: as for `train`.
        SetupError: a demonstration is invalid or too long, or a model is missing.

    Example:
        >>> sft(
        ...     {"trainer.policy.model.path": "Qwen/Qwen2.5-0.5B"},
        ...     demonstrations=[{"prompt": "2 + 2?", "completion": "4"}] * 64,
        ... ).step
        1
    """
    config = _settings(as_config(config))
    try:
        if demonstrations is None:
            rows = [row for path in config.data.train_data for row in placed_rows(path, "train")]
        else:
            rows = [(f"demonstrations, row {n}", row) for n, row in enumerate(demonstrations)]
        held_out = [row for path in config.data.val_data for row in placed_rows(path, "test")]
        chats = [(where, chat_of(row, where)) for where, row in rows]
        held_out_chats = [(where, chat_of(row, where)) for where, row in held_out]
    except ValueError as error:
        raise SetupError(str(error)) from error
    numbered = {str(number): chat for number, chat in enumerate(chats)}
    numbered |= {f"{EVAL_UID}{number}": chat for number, chat in enumerate(held_out_chats)}
    return train(
        config,
        prompts=_prompts(chats),
        eval_prompts=_prompts(held_out_chats) or None,
        callbacks=callbacks,
        make_rollouts=partial(_demonstrations, chats=numbered),
    )


def _settings(config: Config) -> Config:
    """Return the settings with those of reinforcement learning replaced."""
    algorithm = replace(
        config.trainer.algorithm,
        policy_loss_type="cross_entropy",
        policy_loss_coef=1.0,
        advantage_estimator="reinforce++",
        use_kl_loss=False,
        use_kl_in_reward=False,
        observation_loss_coef=0.0,
    )
    generator = replace(
        config.generator,
        n_samples_per_prompt=1,
        eval_n_samples_per_prompt=1,
        sampling_params=replace(config.generator.sampling_params, temperature=1.0),
    )
    trainer = replace(config.trainer, algorithm=algorithm, dump_trajectories=False)
    return replace(config, trainer=trainer, generator=generator)


def _prompts(chats: Iterable[tuple[str, list[Message]]]) -> list[dict[str, Any]]:
    return [{"prompt": chat[: first_answer(chat)], "demonstration": chat} for _, chat in chats]


async def _demonstrations(
    config: Config,
    tokenizer: Any,
    model_path: str,
    *,
    chats: Mapping[str, tuple[str, list[Message]]],
) -> Demonstrations:
    generator = loop_settings(config)
    try:
        steps = {
            uid: demonstrated_steps(chat, tokenizer, generator, where)
            for uid, (where, chat) in chats.items()
        }
    except ContextError as error:
        raise ValueError(str(error)) from error
    return Demonstrations(steps)


class Demonstrations:
    """The `Rollouts` of supervised fine-tuning: nothing is sampled."""

    def __init__(self, steps: Mapping[str, list[Step]]) -> None:
        """Store the steps of each prompt, by uid."""
        self.board = ActivityBoard()
        self._steps = steps
        self._policy: Policy | None = None

    async def generate(
        self, prompts: Sequence[Prompt], *, step: int, phase: str
    ) -> list[Trajectory]:
        """Return the demonstrations of the prompts; in evaluation with rewards."""
        trajectories = [self._trajectory(prompt, phase) for prompt in prompts]
        if phase == "eval":
            await asyncio.to_thread(self._score, trajectories)
        return trajectories

    def _trajectory(self, prompt: Prompt, phase: str) -> Trajectory:
        return Trajectory(
            uid=prompt.uid,
            repetition_id=0,
            steps=[replace(step) for step in self._steps[prompt.uid]],
            stop_reason=STOP,
            env_class="demonstration",
            env_metrics={},
            seconds=0.0,
            phase=phase,
            data_source=prompt.data_source,
        )

    def _score(self, trajectories: Sequence[Trajectory]) -> None:
        """Set the last step's reward to the mean log-probability of the trained tokens."""
        assert self._policy is not None
        batch = batch_from_trajectories(trajectories)
        values = self._policy.batch_logprobs(batch).double().numpy()
        cu, mask = batch.cu_responses.numpy(), batch.loss_mask.numpy()
        sums, counts = segment_sums(values, cu, float), segment_sums(mask, cu, int)
        row = 0
        for trajectory in trajectories:
            rows = slice(row, row + len(trajectory.steps))
            trajectory.steps[-1].reward = float(sums[rows].sum() / counts[rows].sum())
            row = rows.stop

    async def sleep(self) -> None:
        """Do nothing: there is no engine."""

    async def update_weights(self, policy: Policy, *, version: int) -> dict[str, float]:
        """Keep the policy for evaluations."""
        self._policy = policy
        return {}

    async def wait_for_fault(self) -> None:
        """Wait for ever: there is no engine."""
        await asyncio.Event().wait()

    async def repair(self, policy: Policy, *, version: int) -> None:
        """Do nothing."""

    def activity(self, uids: Sequence[str]) -> list[str]:
        """Return nothing."""
        return []

    def faults(self) -> dict[str, float]:
        """Return nothing."""
        return {}

    async def close(self) -> None:
        """Do nothing."""
