"""Calls of the policy: prompt tokens in, sampled tokens with their versions out."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from skyrl_fast.config import SamplingParams
from skyrl_fast.config.settings import REFERENCE
from skyrl_fast.rollout.continued import generate_through_updates
from skyrl_fast.rollout.engine.protocol import EngineError, Generation, Sampler
from skyrl_fast.rollout.engine.weights.gate import WeightGate
from skyrl_fast.rollout.tokenization import decode
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.rollout.turn import request_seed


@dataclass(frozen=True, slots=True)
class PolicyCalls:
    """The engine as all trajectories of a run call it.

    Args:
        seed: the run's, for `request_seed`.
        policies: names of the policies that are trained, or of the roles of one; empty: one
            without a name.
        are_roles: the names are those of roles, of which the engine knows nothing.
    """

    engine: Sampler
    gate: WeightGate
    tokenizer: Any
    seed: int
    policies: tuple[str, ...] = ()
    are_roles: bool = False

    @property
    def sampled(self) -> tuple[str, ...]:
        if self.are_roles:
            return self.policies
        if self.policies:
            return (*self.policies, REFERENCE)
        return ()

    async def sample(
        self,
        trajectory: Trajectory,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        policy_version: int,
        attempt: int,
        place: int | str,
        expert_indices_start: int = 0,
        policy: str | None = None,
    ) -> Generation:
        """Return one response, through any weight updates, with its versions and seconds.

        Args:
            place: place of the call in its trajectory, such as the turn, for the seeds.

        Raises:
            EngineError: the engine refused or failed it, or returned nothing. EngineDeadError: it
                died.
        """
        sample = f"{trajectory.uid}-{trajectory.repetition_id}"
        name = f"{trajectory.phase}-{policy_version}-{sample}"
        # Evaluations use the same seeds for every version, so that only the policy differs.
        if trajectory.phase == "eval":
            seed_name = f"eval-{sample}"
        else:
            seed_name = name

        def part_seed(part: int) -> int:
            if part == 0:
                part_name = seed_name
            else:
                part_name = f"{seed_name}+{part}"
            return request_seed(self.seed, part_name, attempt, place)

        started = time.perf_counter()
        generation = await generate_through_updates(
            self.engine,
            self.gate,
            self.tokenizer,
            list(prompt_token_ids),  # it may grow with the next turns; an engine may keep it
            sampling,
            session_id=f"{name}-{attempt}",
            part_seed=part_seed,
            expert_indices_start=expert_indices_start,
            policy=None if self.are_roles else policy,
        )
        if not generation.token_ids:
            raise EngineError(f"the engine returned no tokens for session {name}-{attempt}")
        last = generation.token_ids[-1]
        stops = sampling.additional_kwargs.get("stop_token_ids")
        if generation.stopped_at_token and last in (stops or ()):
            # It ends the answer as a stop string does, and not the model's turn.
            generation = replace(generation, stop_string=decode(self.tokenizer, [last]))
        return replace(generation, seconds=time.perf_counter() - started)
