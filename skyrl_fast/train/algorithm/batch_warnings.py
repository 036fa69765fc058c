"""Settings that a batch shows to be wrong: each said once, with the setting that governs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from skyrl_fast.config import Config, estimator_spec, sums_rewards
from skyrl_fast.ops.advantage.estimators import ADVANTAGE_ESTIMATORS
from skyrl_fast.rollout.stop_reason import LENGTH, MAX_TURNS
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.algorithm.reward_parts import OUTCOME

logger = logging.getLogger(__name__)

MAX_SHOWN = 8  # rewards of the example


def unread_rewards(config: Config, trajectories: Sequence[Trajectory]) -> str | None:
    """Return what to set if steps before the last one have rewards that are not read, else None."""
    # An estimator of level "outcome" reads the last row's reward. A row of a full trajectory
    # (`trainer.rows=trajectory`) has the sum of all.
    spec = estimator_spec(config.trainer.algorithm)
    if spec.level != "outcome" or config.trainer.rows == "trajectory":
        return None
    if spec.needs_parts and OUTCOME not in config.trainer.algorithm.gdpo_weights:
        return None
    for trajectory in trajectories:
        rewards = [step.reward for step in trajectory.steps]
        if trajectory.failure is None and any(rewards[:-1]):
            break
    else:
        return None
    # Those of contexts are for runs that have several.
    levels = ("turn", "token")
    others = ", ".join(n for n, other in ADVANTAGE_ESTIMATORS.items() if other.level in levels)
    shown = ", ".join(f"{reward:g}" for reward in rewards[-MAX_SHOWN:])
    return (
        f"trainer.algorithm.advantage_estimator={spec.name} reads the reward of a trajectory's "
        "last step only, so rewards of earlier steps are ignored: sample "
        f"{trajectory.repetition_id} of prompt {trajectory.uid!r} has "
        f"{'..., ' if len(rewards) > MAX_SHOWN else ''}{shown} and counts as {rewards[-1]:g}. "
        "That is right where the last reward is that of the whole trajectory; else return the sum "
        "with the last step, or set trainer.rows=trajectory (one row per trajectory, with the "
        f"sum), or choose an estimator that reads all: {others}"
    )


def reached_turn_limit(config: Config, trajectories: Sequence[Trajectory]) -> str | None:
    """Return what to set if a trajectory had as many turns as one can have without a setting."""
    if config.generator.max_turns is not None:
        return None
    ended = [t for t in trajectories if t.stop_reason == MAX_TURNS]
    if not ended:
        return None
    return (
        f"{len(ended)} of {len(trajectories)} trajectories were not done after "
        f"{config.generator.turn_limit} turns, the limit where generator.max_turns is null: set it "
        "to the turns that the task takes"
    )


def all_at_max_turns(config: Config, trajectories: Sequence[Trajectory]) -> str | None:
    """Return what to set if no trajectory was done within `generator.max_turns`."""
    if config.generator.max_turns is None or not _all_end_by(trajectories, MAX_TURNS):
        return None
    return (
        f"all {len(trajectories)} trajectories of a batch ended at generator.max_turns="
        f"{config.generator.max_turns}, before their environment or agent was done: set it higher, "
        "or to null (until done)"
    )


def all_too_long(config: Config, trajectories: Sequence[Trajectory]) -> str | None:
    """Return what to set if every trajectory ended by a prompt or an answer that was too long."""
    if not _all_end_by(trajectories, LENGTH):
        return None
    # The answer was cut, or else the next prompt, which no step has, was too long.
    cut = []
    for t in trajectories:
        if t.steps and _was_cut(config, t):
            cut.append(t)
    generator = config.generator
    answers = f"generator.sampling_params.max_generate_length={_answer_limit(config)}"
    prompts = f"generator.max_input_length={generator.max_input_length}"
    if len(cut) == len(trajectories):
        return f"every answer that ended a trajectory of a batch was cut at {answers}"
    if not cut:
        return f"all {len(trajectories)} trajectories of a batch ended by a prompt over {prompts}"
    return (
        f"all {len(trajectories)} trajectories of a batch ended for their length: {len(cut)} by an "
        f"answer cut at {answers}, the others by a prompt over {prompts}"
    )


def all_rewards_equal(config: Config, trajectories: Sequence[Trajectory]) -> str | None:
    """Return what to look at if an estimator compares rewards, of which all are equal."""
    spec = estimator_spec(config.trainer.algorithm)
    acted = [t for t in trajectories if t.has_acted]
    rewards = {t.outcome(sums_rewards=sums_rewards(config)) for t in acted}
    # A reward that is not read is another warning's subject.
    earlier = any(step.reward for t in acted for step in t.steps[:-1])
    is_several = len(acted) > 1 and config.generator.n_samples_per_prompt > 1
    # Parts may differ where their sum does not.
    is_compared = spec.compares_group and not spec.needs_parts
    if not (is_compared and is_several and len(rewards) == 1) or earlier:
        return None
    return (
        f"all {len(acted)} trajectories of a batch have the reward {rewards.pop():g}, so that "
        f"trainer.algorithm.advantage_estimator={spec.name}, which compares the samples of a "
        "prompt, trains nothing: see rewards of sample answers with `skyrl-fast try`"
    )


def _all_end_by(trajectories: Sequence[Trajectory], stop_reason: str) -> bool:
    reasons = {t.stop_reason for t in trajectories}
    return len(trajectories) > 1 and reasons == {stop_reason}


def _answer_limit(config: Config) -> int:
    return config.generator.sampling_params.max_generate_length


def _was_cut(config: Config, trajectory: Trajectory) -> bool:
    last = trajectory.steps[-1]
    return sum(last.loss_mask) >= _answer_limit(config)


_OF_BATCHES = (reached_turn_limit, all_at_max_turns, all_too_long, all_rewards_equal)
_OF_POLICIES = (unread_rewards,)


class BatchWarnings:
    """Warns once of each thing: the settings do not change during a run."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._warned: set[Callable[..., str | None]] = set()

    def see_batch(self, trajectories: Sequence[Trajectory]) -> None:
        """Look at the complete trajectories of a training batch."""
        self._warn(_OF_BATCHES, trajectories)

    def see_policy(self, trajectories: Sequence[Trajectory]) -> None:
        """Look at the trajectories of one policy."""
        self._warn(_OF_POLICIES, trajectories)

    def _warn(
        self,
        checks: Sequence[Callable[[Config, Sequence[Trajectory]], str | None]],
        trajectories: Sequence[Trajectory],
    ) -> None:
        for check in checks:
            if check in self._warned:
                message = None
            else:
                message = check(self._config, trajectories)
            if message is not None:
                self._warned.add(check)
                logger.warning("%s", message)
