"""The trainer, driven through steps of scripted trajectories, and a record of all it does."""

import asyncio
import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from _fakes import FakeTokenizer, make_prompts
from _teachers import teachers_of

from skyrl_fast.batch import StepBatch
from skyrl_fast.config import Config
from skyrl_fast.rollout.activity import ActivityBoard
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train import trainer as trainer_module
from skyrl_fast.train.algorithm.dynamic_sampling import DynamicSamplingError
from skyrl_fast.train.data.prompts import Prompt
from skyrl_fast.train.model.models import Models, make_models
from skyrl_fast.train.model.optimizer import Optimizer
from skyrl_fast.train.parallel.ranks import SINGLE_RANK
from skyrl_fast.train.trainer import Components, Trainer

Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class OptimizerStep:
    """Weights before and after a step, and the gradients of those that have one, in float64."""

    before: Tensors
    gradient: Tensors
    after: Tensors


@dataclass(slots=True)
class TrainedBatch:
    """What a policy was trained on, and its optimizer steps.

    Args:
        weights: the policy's before the batch, and the critic's.
    """

    policy: str | None
    batch: StepBatch
    weights: Tensors
    critic_weights: Tensors
    steps: list[OptimizerStep] = field(default_factory=list)
    critic_steps: list[OptimizerStep] = field(default_factory=list)


@dataclass(slots=True)
class DrivenStep:
    """A step of the trainer: its trajectories, what it trained, what it reported."""

    trajectories: list[Trajectory]
    trained: list[TrainedBatch] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class ScriptedRollouts:
    """Returns trajectories by the prompt's uid."""

    def __init__(self, trajectories: Mapping[str, Sequence[Trajectory]]) -> None:
        self.board = ActivityBoard()
        self.sampled: list[str] = []  # prompts, in the order in which they were asked for
        self._trajectories = trajectories

    async def generate(
        self, prompts: Sequence[Prompt], *, step: int, phase: str
    ) -> list[Trajectory]:
        self.sampled += [prompt.uid for prompt in prompts]
        found = []
        for prompt in prompts:
            group = copy.deepcopy(self._trajectories[prompt.uid])
            for trajectory in group:
                trajectory.data_source = prompt.data_source
            found += group
        return found

    async def sleep(self, policy: Any) -> None:
        pass

    async def update_weights(self, policy: Any, *, version: int) -> dict[str, float]:
        return {}

    async def wait_for_fault(self) -> None:
        await asyncio.Event().wait()

    async def repair(self, policy: Any, *, version: int) -> None:
        raise AssertionError("nothing is broken")

    def activity(self, uids: Sequence[str]) -> list[str]:
        return []

    def faults(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        pass


class _Silent:
    """A display, and a logger, that keep the last metrics."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def phase(self, name: str) -> None:
        pass

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics.append(dict(metrics))


def uids_of_run(number: int) -> list[str]:
    return [prompt.uid for prompt in make_prompts(number)]


def prompts_of_run(number: int, *, sources: Sequence[str]) -> list[Prompt]:
    """Return prompts of the sources in turn."""
    prompts = make_prompts(number)
    if not sources:
        return prompts
    names = [sources[place % len(sources)] for place in range(number)]
    return [replace(one, data_source=name) for one, name in zip(prompts, names, strict=True)]


def drive(
    config: Config, trajectories: Mapping[str, Sequence[Trajectory]]
) -> tuple[list[str], list[DrivenStep]]:
    """Run the trainer over all prompts once.

    Returns:
        The prompts in the order in which they were sampled, and the steps.
    """
    prompts = prompts_of_run(len(trajectories), sources=list(config.data.mixture))
    models = make_models(config, None, len(prompts), SINGLE_RANK)
    display = _Silent()
    distillation = config.trainer.algorithm.distillation
    sources = distillation.teachers
    rollouts = ScriptedRollouts(trajectories)
    components = Components(
        trained=models.trained,
        tokenizer=FakeTokenizer(),
        rollouts=rollouts,
        train_prompts=prompts,
        eval_prompts=[],
        reference=models.reference,
        critic=models.critic,
        teachers=teachers_of(sources, top_k=distillation.top_k) if sources else None,
    )
    trainer = Trainer(config, components, display)  # type: ignore[arg-type]
    # Too few informative groups for a step: the comparison finds as few.
    with _recording(trainer, models) as steps, contextlib.suppress(DynamicSamplingError):
        asyncio.run(trainer.run())
    for step, metrics in zip(steps, display.metrics, strict=True):
        step.metrics = metrics
    return rollouts.sampled, steps


@contextmanager
def _recording(trainer: Trainer, models: Models) -> Iterator[list[DrivenStep]]:
    steps: list[DrivenStep] = []
    critic = models.critic
    train_policies = trainer.train_policies
    train_policy = trainer.train_policy
    with_advantages = trainer_module.with_advantages
    step_of = Optimizer.step

    async def begin(trajectories: Any, *more: Any) -> Any:
        steps.append(DrivenStep(list(trajectories)))
        return await train_policies(trajectories, *more)

    async def train(name: Any, *more: Any) -> Any:
        nonlocal current
        current = name
        return await train_policy(name, *more)

    def advantages(*arguments: Any, **more: Any) -> Any:
        result = with_advantages(*arguments, **more)
        weights = _weights(models.trained[current].optimizer)
        of_critic = {} if critic is None else _weights(critic.optimizer)
        steps[-1].trained.append(TrainedBatch(current, result[0], weights, of_critic))
        return result

    def step(optimizer: Optimizer) -> dict[str, float]:
        before = _weights(optimizer)
        gradient = {
            name: parameter.grad.detach().double().clone()
            for name, parameter in optimizer.named_parameters
            if parameter.grad is not None
        }
        result = step_of(optimizer)
        trained = steps[-1].trained[-1]
        is_critic = critic is not None and optimizer is critic.optimizer
        into = trained.critic_steps if is_critic else trained.steps
        into.append(OptimizerStep(before, gradient, _weights(optimizer)))
        return result

    current: str | None = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_policies", begin)
        patch.setattr(trainer, "train_policy", train)
        patch.setattr(trainer.saver, "save", lambda: None)
        patch.setattr(trainer.saver, "save_last", lambda: None)
        patch.setattr(trainer_module, "with_advantages", advantages)
        patch.setattr(Optimizer, "step", step)
        yield steps


def _weights(optimizer: Optimizer) -> Tensors:
    return {name: value.detach().double().clone() for name, value in optimizer.named_parameters}
