"""verl with this package's advantages, log-probabilities, and packing of padded batches.

    import skyrl_fast.integrations.verl as fast
    fast.register()  # then algorithm.adv_estimator=skyrl_fast_grpo

N rows, W padded width, R response width, S real tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from skyrl_fast.ops.advantage.group import group_advantage
from skyrl_fast.ops.logprob.selected import selected_logprob
from skyrl_fast.ops.pack.varlen import padded_to_varlen, varlen_to_padded

ESTIMATORS = ("grpo", "rloo", "maxrl")
PREFIX = "skyrl_fast_"
Pair = tuple[torch.Tensor, torch.Tensor]


def register() -> list[str]:
    """Add the estimators to verl's registry as `skyrl_fast_grpo`, `_rloo`, `_maxrl`; return names.

    Raises:
        ImportError: verl is not installed.
    """
    from verl.trainer.ppo.core_algos import register_adv_est

    for name in ESTIMATORS:
        register_adv_est(PREFIX + name)(_FUNCTIONS[name])
    return [PREFIX + name for name in ESTIMATORS]


def _estimator(estimator: str) -> Callable[..., Pair]:
    def advantage(
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: Sequence[str] | np.ndarray,
        epsilon: float = 1e-6,
        norm_adv_by_std_in_grpo: bool = True,
        config: Any = None,
        **_: Any,
    ) -> Pair:
        """Return advantages and returns, one tensor: `group_advantage`, float64 statistics.

        Args:
            token_level_rewards, response_mask: (N, R).
            index: N group names.
            epsilon: must be 1e-6, the op's constant.
            norm_adv_by_std_in_grpo: False for Dr. GRPO.

        Raises:
            ValueError: another epsilon, or an error of `group_advantage`.
        """
        if epsilon != 1e-6:
            raise ValueError(f"{PREFIX}{estimator}: epsilon must be 1e-6, got {epsilon}")
        plain = estimator == "grpo" and not norm_adv_by_std_in_grpo
        out = group_advantage(
            token_level_rewards,
            [str(name) for name in index],
            response_mask=response_mask.to(torch.float32),
            estimator="dr_grpo" if plain else estimator,
        )
        return out, out

    return advantage


_FUNCTIONS = {name: _estimator(name) for name in ESTIMATORS}


def logprobs_from_logits(
    logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True
) -> torch.Tensor:
    """Return each label's log-probability in float32, as verl's function of that name.

    Args:
        logits: (..., V). labels: (...), integers.
        inplace_backward: on a GPU the gradient may overwrite the logits, as with verl's kernel.

    Example:
        >>> logprobs_from_logits(torch.zeros(1, 2), torch.tensor([1]))
        tensor([-0.6931])
    """
    out = selected_logprob(
        logits, labels, inplace_backward=inplace_backward and logits.device.type == "cuda"
    )
    assert isinstance(out, torch.Tensor)
    return out


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Return the real tokens packed, as flash-attn's and verl's function of that name.

    Args:
        hidden_states: (N, W, ...). attention_mask: (N, W), 1 on real tokens. Rows padded only on
            the left are packed natively, any others by index.

    Returns:
        values (S, ...), indices (S,) int64 into the N * W positions, cu_seqlens (N + 1,) int32, the
        maximum length, lengths (N,) int32.

    Example:
        >>> unpad_input(torch.tensor([[0, 5], [6, 7]]), torch.tensor([[0, 1], [1, 1]]))[0]
        tensor([5, 6, 7])
    """
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    longest = int(lengths.max()) if len(lengths) else 0
    indices = attention_mask.reshape(-1).nonzero()[:, 0]
    cu_seqlens = _offsets(lengths)
    if torch.equal(indices, _left_padded_cells(lengths, attention_mask.shape[1])):
        values = padded_to_varlen(hidden_states, lengths=lengths).values
    else:
        values = hidden_states.flatten(0, 1).index_select(0, indices)
    return values, indices, cu_seqlens, longest, lengths


def pad_input(
    hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int
) -> torch.Tensor:
    """Return the padded tensor, zeros on padding, as verl's function of that name.

    Args:
        hidden_states: (S, ...). indices: (S,), from `unpad_input`. batch, seqlen: N, W.

    Example:
        >>> pad_input(torch.tensor([5, 6, 7]), torch.tensor([1, 2, 3]), 2, 2)
        tensor([[0, 5],
                [6, 7]])
    """
    lengths = torch.bincount(indices // seqlen, minlength=batch)
    if torch.equal(indices, _left_padded_cells(lengths, seqlen)):
        return varlen_to_padded(hidden_states, _offsets(lengths), width=seqlen)
    cells = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return cells.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def _left_padded_cells(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """Return (S,) int64: the positions of real tokens if all padding is on the left."""
    rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths.long())
    position = torch.arange(len(rows), device=lengths.device) - _offsets(lengths)[rows]
    return rows * width + (width - lengths.long())[rows] + position
