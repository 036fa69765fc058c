"""append_rollout_expert_indices: recorded rows never change, new rows are appended."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from skyrl_fast import append_rollout_expert_indices


def rows(*values: int, layers: int = 2, top_k: int = 2, dtype: Any = np.uint8) -> np.ndarray:
    """One row per value; its cells are value, value + 1, ..."""
    cells = np.arange(layers * top_k).reshape(layers, top_k)
    return (np.array(values).reshape(-1, 1, 1) + cells).astype(dtype)


@pytest.mark.spec("replay.worked-example")
def test_nine_tokens_of_two_turns_have_eight_routes() -> None:
    """Prompt A A, sampled B B B; observation O O, sampled C C. The last C is not processed."""
    turn_1 = rows(10, 11, 20, 21)  # A0 A1 B0 B1
    turn_2 = rows(90, 91, 92, 93, 22, 30, 31, 40)  # the first four are recomputed
    record = append_rollout_expert_indices(None, turn_1)
    record = append_rollout_expert_indices(record, turn_2)
    assert record[:, 0, 0].tolist() == [10, 11, 20, 21, 22, 30, 31, 40]  # ... B2 O0 O1 C0
    np.testing.assert_array_equal(record, rows(10, 11, 20, 21, 22, 30, 31, 40))


@pytest.mark.spec("replay.append-none", "replay.append-new")
def test_turn_without_new_tokens_changes_nothing() -> None:
    recorded = rows(1, 2, 3)
    assert append_rollout_expert_indices(recorded, rows(7, 8, 9)) is recorded
    assert append_rollout_expert_indices(recorded, None) is recorded


@pytest.mark.spec("replay.append-first")
def test_empty_record_takes_the_new_rows() -> None:
    new = rows(1, 2)
    assert append_rollout_expert_indices(None, new) is new
    assert append_rollout_expert_indices(rows(), new) is new
    assert append_rollout_expert_indices(None, None) is None
    empty = append_rollout_expert_indices(None, rows())
    assert empty.shape == (0, 2, 2)
    assert append_rollout_expert_indices(empty, rows()).shape == (0, 2, 2)


@pytest.mark.spec("replay.no-routes")
def test_appended_end_token_has_its_route_in_the_next_turn() -> None:
    """Prompt 2, sampled 1, an end token appended: 2 routes for 4 tokens; then 2 + 1 more."""
    record = append_rollout_expert_indices(None, rows(1, 2))
    record = append_rollout_expert_indices(record, rows(8, 8, 3, 4, 5))
    assert record[:, 0, 0].tolist() == [1, 2, 3, 4, 5]


def test_engine_may_return_only_new_rows() -> None:
    recorded = rows(1, 2, 3)
    assert append_rollout_expert_indices(recorded, rows(4, 5), start=3)[:, 0, 0].tolist() == [
        *(1, 2, 3, 4, 5)
    ]
    assert append_rollout_expert_indices(recorded, rows(9, 4), start=2)[:, 0, 0].tolist() == [
        *(1, 2, 3, 4)
    ]
    assert append_rollout_expert_indices(recorded, rows(), start=3) is recorded
    with pytest.raises(ValueError, match="rows are missing between"):
        append_rollout_expert_indices(recorded, rows(5), start=4)
    with pytest.raises(ValueError, match="rows are missing between"):
        append_rollout_expert_indices(None, rows(5), start=1)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        append_rollout_expert_indices(recorded, rows(5), start=-1)


@pytest.mark.spec("replay.append-errors")
@pytest.mark.parametrize(
    ("recorded", "new", "message"),
    [
        (rows(1), rows(1, 2, layers=3), r"\(L, K\) = \(2, 2\), got \(3, 2\)"),
        (rows(1), rows(1, 2, top_k=1), r"\(L, K\) = \(2, 2\), got \(2, 1\)"),
        (rows(1, 2), rows(1), r"as far as recorded \(2 rows\), got 1"),
        (rows(1, 2), rows(), r"as far as recorded \(2 rows\), got 0"),
        (None, np.zeros((2, 2), np.uint8), r"new: expected shape \(tokens, L, K\), got \(2, 2\)"),
        (np.zeros(3, np.uint8), rows(1, 2, 3), r"recorded: expected shape"),
    ],
)
def test_mismatch_errors(recorded: Any, new: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        append_rollout_expert_indices(recorded, new)


@pytest.mark.parametrize("new", [np.zeros((1, 1, 1)), torch.zeros(1, 1, 1, dtype=torch.bool)])
def test_non_integer_routes_are_refused(new: Any) -> None:
    with pytest.raises(TypeError, match="expected integers"):
        append_rollout_expert_indices(None, new)


def test_tensors_and_nested_lists() -> None:
    record = append_rollout_expert_indices(torch.from_numpy(rows(1)), rows(9, 2))
    assert isinstance(record, torch.Tensor)
    assert record[:, 0, 0].tolist() == [1, 2]
    record = append_rollout_expert_indices(rows(1).tolist(), rows(9, 2).tolist())
    assert isinstance(record, np.ndarray)
    assert record[:, 0, 0].tolist() == [1, 2]


def test_wider_ids_widen_the_record() -> None:
    record = append_rollout_expert_indices(rows(1), rows(9, 300, dtype=np.uint16))
    assert record[:, 0, 0].tolist() == [1, 300]


@pytest.mark.spec("replay.append-only")
@given(
    base=hnp.arrays(np.uint8, st.tuples(st.integers(0, 12), st.just(2), st.just(3))),
    ends=st.lists(st.integers(0, 12), max_size=5),
    data=st.data(),
)
def test_turns_of_any_lengths(base: np.ndarray, ends: list[int], data: st.DataObject) -> None:
    """Each row is that of the first turn that reached its token; later turns never change it."""
    record, wanted = None, []
    for end in sorted(min(end, len(base)) for end in ends):
        noise = data.draw(hnp.arrays(np.uint8, (end, 2, 3)))
        start = data.draw(st.integers(0, len(wanted)))
        before = None if record is None else record.copy()
        after = append_rollout_expert_indices(record, noise[start:], start=start)
        if before is not None:
            np.testing.assert_array_equal(record, before)
        wanted += noise[len(wanted) :].tolist()
        assert after.tolist() == wanted
        record = after
