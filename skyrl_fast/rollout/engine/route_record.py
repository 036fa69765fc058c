"""Routes of a trajectory's rows: appended while the context grows, restarted after a fork.

Design: docs/design/013-router-replay.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from skyrl_fast.ops.pack.routed_experts import append_rollout_expert_indices
from skyrl_fast.rollout.engine.protocol import EngineError, Generation
from skyrl_fast.rollout.trajectory import Step


def find_recorded_routes(
    steps: Sequence[Step], prompt_token_ids: Sequence[int]
) -> np.ndarray | None:
    """Return the routes recorded for the first tokens of this prompt, or None.

    They are valid only if the prompt begins with all tokens of the previous step, including an
    appended end token. Otherwise the tokens had another context.
    """
    if not steps or steps[-1].expert_indices is None:
        return None
    previous = [*steps[-1].prompt_token_ids, *steps[-1].response_ids]
    grows = list(prompt_token_ids[: len(previous)]) == previous
    if grows:
        return steps[-1].expert_indices
    return None


def turn_routes(
    steps: Sequence[Step], prompt_token_ids: Sequence[int], generation: Generation
) -> np.ndarray | None:
    """Return the routes of this turn's row: integers [tokens, L, K], or None if none are recorded.

    Args:
        steps: the trajectory so far, without this turn.

    Raises:
        EngineError: the routes do not continue the record.
    """
    try:
        routes = append_rollout_expert_indices(
            find_recorded_routes(steps, prompt_token_ids),
            generation.expert_indices,
            start=generation.expert_indices_start,
        )
    except (TypeError, ValueError) as error:
        raise EngineError(
            f"the engine's routes do not fit turn {len(steps) + 1}: {error}"
        ) from error
    if routes is None:
        return None
    return np.asarray(routes)
