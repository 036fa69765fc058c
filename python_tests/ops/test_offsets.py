"""Offsets and lengths of rows: every op takes integers that int32 can hold, and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import skyrl_fast as sf
from skyrl_fast.ops._offsets import check_offsets
from skyrl_fast.ops.merge.steps import merge_flat_steps

CELLS = torch.arange(1.0, 5.0)
IDS = torch.zeros(2, dtype=torch.int64)
OPS: dict[str, Callable[[Any], object]] = {
    "policy_loss": lambda cu: sf.policy_loss(CELLS, CELLS, CELLS, CELLS, cu_seqlens=cu),
    "masked_logprob_loss": lambda cu: sf.masked_logprob_loss(
        *(torch.zeros(4, 3), torch.ones(4, dtype=torch.int64), CELLS, CELLS),
        row_weights=torch.ones(2),
        cu_seqlens=cu,
    ),
    "reduction_weights": lambda cu: sf.reduction_weights(
        CELLS, reduction="sequence_mean", cu_seqlens=cu
    ),
    "off_policy_correction": lambda cu: sf.off_policy_correction(
        CELLS, CELLS, CELLS, tis_ratio_type="sequence", cu_seqlens=cu
    ),
    "group_advantage": lambda cu: sf.group_advantage(CELLS, IDS, cu_seqlens=cu),
    "gdpo_advantage": lambda cu: sf.gdpo_advantage(torch.ones(2, 3), IDS, cu_seqlens=cu),
    "turn_level_returns": lambda cu: sf.turn_level_returns(CELLS, cu_seqlens=cu),
    "turn_group_advantage": lambda cu: sf.turn_group_advantage(CELLS, IDS, cu_seqlens=cu),
    "gigpo_advantage": lambda cu: sf.gigpo_advantage(CELLS, IDS, IDS, cu_seqlens=cu),
    "gae": lambda cu: sf.gae(CELLS, CELLS, cu_seqlens=cu),
    "reinforce_plus_plus": lambda cu: sf.reinforce_plus_plus(CELLS, cu_seqlens=cu),
    "pack_steps": lambda cu: sf.pack_steps({"rewards": (CELLS, cu)}),
    "varlen_to_padded": lambda cu: sf.varlen_to_padded(CELLS, cu),
    "build_prefix_tree": lambda cu: sf.build_prefix_tree(CELLS.int(), cu),
    "merge_flat_steps": lambda cu: merge_flat_steps(CELLS.int(), cu, cu, IDS.int()),
}
BAD = {
    "wraps to 2": torch.tensor([0, 2**32 + 2, 4]),
    "wraps to 0": torch.tensor([2**32, 2, 4]),
    "negative": torch.tensor([0, 2 - 2**32, 4]),
    "float": torch.tensor([0, 2.7, 4]),
    "bool": torch.tensor([False, True, True]),
    "two dimensions": torch.tensor([[0, 2, 4]]),
    "empty": torch.tensor([], dtype=torch.int64),
}


@pytest.mark.spec("batch.offset-checks")
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("op", OPS)
def test_bad_offsets_are_refused(op: str, bad: str) -> None:
    with pytest.raises(ValueError, match=rf"{op}: .*: expected .* got "):
        OPS[op](BAD[bad])


@pytest.mark.spec("batch.offset-checks")
@pytest.mark.parametrize("bad", [[0, 2**28, 4], [0, 3, 2, 4], [0, 2, 5], [1, 4]])
@pytest.mark.parametrize("op", ["policy_loss", "reduction_weights", "off_policy_correction"])
def test_the_torch_backend_refuses_offsets_beyond_the_cells(op: str, bad: list[int]) -> None:
    cu = torch.tensor(bad, dtype=torch.int32)
    message = f"{op}: cu_seqlens: expected non-decreasing offsets from 0 to 4, got"
    with pytest.raises(ValueError, match=message):
        if op == "policy_loss":
            weights = torch.ones(len(bad) - 1)
            sf.policy_loss(
                *(CELLS, CELLS, CELLS, CELLS), cu_seqlens=cu, row_weights=weights, backend="torch"
            )
        elif op == "reduction_weights":
            sf.reduction_weights(CELLS, reduction="token_mean", cu_seqlens=cu, backend="torch")
        else:
            sf.off_policy_correction(
                *(CELLS, CELLS, CELLS), tis_ratio_type="token", cu_seqlens=cu, backend="torch"
            )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_offsets_of_any_integer_dtype_become_int32(dtype: torch.dtype) -> None:
    checked = check_offsets("op", "cu_seqlens", torch.tensor([0, 2, 4], dtype=dtype), total=4)
    assert checked.dtype == torch.int32
    assert checked.tolist() == [0, 2, 4]


def test_offsets_name_op_argument_wanted_and_got() -> None:
    message = "op: cu_seqlens: expected offsets from 0 to 2147483647, got 4294967298"
    with pytest.raises(ValueError, match=message):
        check_offsets("op", "cu_seqlens", BAD["wraps to 2"])
    with pytest.raises(
        ValueError, match="op: cu: expected non-decreasing offsets from 0 to 5, got"
    ):
        check_offsets("op", "cu", torch.tensor([0, 2, 4]), total=5)
    with pytest.raises(
        ValueError, match="op: cu: expected non-decreasing offsets from 0 to 4, got"
    ):
        check_offsets("op", "cu", torch.tensor([0, 3, 2, 4]), total=4)
    with pytest.raises(TypeError, match="op: cu: expected integers, got list"):
        check_offsets("op", "cu", ["a"])
    with pytest.raises(ValueError, match="op: cu: expected values, got a tensor on the meta"):
        check_offsets("op", "cu", torch.zeros(2, dtype=torch.int64, device="meta"))


def test_compiled_policy_loss_refuses_offsets_that_int32_cannot_hold() -> None:
    def loss(logprobs: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
        return sf.policy_loss(logprobs, CELLS, CELLS, CELLS, cu_seqlens=cu).loss

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    right = torch.tensor([0, 2, 4])
    torch.testing.assert_close(compiled(CELLS, right), loss(CELLS, right))
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        compiled(CELLS, BAD["wraps to 2"])


LENGTHS: dict[str, Callable[[Any], object]] = {
    "build_prefix_tree": lambda n: sf.build_prefix_tree(
        torch.arange(3), torch.tensor([0, 3]), lengths=n
    ),
    "padded_to_varlen": lambda n: sf.padded_to_varlen(torch.ones(1, 3), lengths=n),
}


@pytest.mark.parametrize("bad", [[2.9], torch.tensor([2.0]), torch.tensor([True])])
@pytest.mark.parametrize("op", LENGTHS)
def test_lengths_that_are_not_integers_are_refused(op: str, bad: object) -> None:
    with pytest.raises(ValueError, match=f"{op}: lengths: expected a 1-D vector of ints, got"):
        LENGTHS[op](bad)


def test_lengths_of_no_rows() -> None:
    tree = sf.build_prefix_tree(torch.arange(0), torch.tensor([0]), lengths=[])
    assert tree.num_nodes == 0
