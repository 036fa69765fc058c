"""pad_batch, pad_training_input_batch and padding_metadata."""

import pytest
import torch

from skyrl_fast import group_advantage, pad_batch, pad_training_input_batch, padding_metadata
from skyrl_fast.train.algorithm.advantages import normalize_advantages


class TensorBatch(dict):
    """Shaped like SkyRL's TrainingInputBatch: a dict of tensors with metadata."""

    metadata: dict | None = None


def small_batch() -> TensorBatch:
    batch = TensorBatch(
        sequences=torch.tensor([[5, 6], [7, 8]]),
        attention_mask=torch.ones(2, 2, dtype=torch.int64),
        loss_mask=torch.ones(2, 1),
        rollout_expert_indices=torch.full((2, 2, 1, 2), 9, dtype=torch.uint8),
        router_padding_mask=torch.zeros(2, 2, dtype=torch.bool),
        rewards=torch.tensor([[1.0], [2.0]]),
        pixel_values=[torch.ones(1), torch.zeros(2)],
        values=None,
    )
    batch.metadata = {"uids": ["a", "b"], "is_last_step": [False, True], "other": [[1]]}
    return batch


@pytest.mark.spec(
    "batch.padding-loss-mask",
    "batch.padding-routes",
    "batch.padding-router-mask",
    "batch.padding-copies-row-0",
)
def test_padding_repeats_row_0_and_trains_nothing() -> None:
    batch = small_batch()
    padded = pad_training_input_batch(batch, 3)  # more rows than there are
    assert type(padded) is TensorBatch
    assert padded["sequences"].tolist() == [[5, 6], [7, 8], [5, 6], [5, 6], [5, 6]]
    assert padded["loss_mask"].tolist() == [[1], [1], [0], [0], [0]]
    assert padded["rollout_expert_indices"][2:].tolist() == [[[[0, 1]]] * 2] * 3
    assert padded["router_padding_mask"].tolist() == [[False] * 2] * 2 + [[True] * 2] * 3
    assert padded["rewards"].tolist() == [[1], [2], [1], [1], [1]]
    assert [t.tolist() for t in padded["pixel_values"]] == [[1], [0, 0], [1], [1], [1]]
    assert padded["values"] is None
    assert padded.metadata["uids"] == ["a", "b", "pad0", "pad1", "pad2"]
    assert padded.metadata["is_last_step"] == [False, True, True, True, True]
    assert padded.metadata["pad_size"] == 3
    assert padded.metadata["other"] == [[1]]
    assert padded.metadata["other"][0] is not batch.metadata["other"][0]


@pytest.mark.spec("batch.padding-uids", "batch.padding-last-step", "batch.padding-trajectory")
def test_padding_rows_are_separate_trajectories() -> None:
    last = torch.tensor(pad_batch(small_batch(), 2).metadata["is_last_step"])
    trajectory = torch.cumsum(torch.cat([torch.tensor([0]), last[:-1].long()]), 0)
    assert trajectory.tolist() == [0, 0, 1, 2]


@pytest.mark.spec("batch.short-padding-rows")
def test_short_padding_rows_attend_to_one_token() -> None:
    padded = pad_batch(small_batch(), 1, mode="cheap")
    assert padded["sequences"][2].tolist() == [5, 6]
    assert padded["attention_mask"][2].tolist() == [0, 1]
    assert padded["rewards"][2].tolist() == [0]
    assert padded["router_padding_mask"][2].all()


@pytest.mark.spec("batch.pad-size-zero")
def test_no_padding_returns_the_same_object() -> None:
    batch = small_batch()
    assert pad_batch(batch, 0) is batch
    assert batch.metadata["pad_size"] == 0
    bare = TensorBatch(loss_mask=torch.ones(1, 1))
    assert pad_batch(bare, 0).metadata == {"pad_size": 0}
    plain = {"loss_mask": torch.ones(1, 1)}
    assert pad_batch(plain, 0) is plain
    assert plain["metadata"] == {"pad_size": 0}


def test_plain_dict_stores_metadata_as_a_key() -> None:
    padded = pad_batch({"loss_mask": torch.ones(1, 1), "metadata": {"uids": ["a"]}}, 1)
    assert padded["metadata"] == {"uids": ["a", "pad0"], "pad_size": 1}
    assert padding_metadata(None, 2) == {"pad_size": 2}


@pytest.mark.spec("batch.padding-metadata")
def test_original_is_unchanged() -> None:
    batch = small_batch()
    pad_batch(batch, 2)["sequences"].zero_()
    assert batch["sequences"].tolist() == [[5, 6], [7, 8]]
    assert batch.metadata["uids"] == ["a", "b"]


@pytest.mark.spec("batch.pad-size-negative")
@pytest.mark.parametrize(
    ("batch", "pad_size", "mode", "error", "message"),
    [
        (
            small_batch(),
            -1,
            "repeat",
            ValueError,
            "pad_batch: pad_size: expected at least 0, got -1",
        ),
        (small_batch(), True, "repeat", TypeError, "pad_size: expected an int"),
        (small_batch(), 1, "free", ValueError, "'free'"),
        ({"x": torch.empty(0, 2)}, 1, "repeat", ValueError, "x: expected a row to repeat"),
        ({"x": 5.0}, 1, "repeat", TypeError, "x: expected a tensor, .* got float"),
    ],
)
def test_invalid_input_error_names_the_argument(
    batch: dict, pad_size: int, mode: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pad_batch(batch, pad_size, mode=mode)


@pytest.mark.spec("batch.padding-trajectory")
@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "maxrl"])
def test_padding_does_not_change_advantages_if_row_0_is_not_a_last_step(estimator: str) -> None:
    batch = TensorBatch(
        rewards=torch.tensor(
            [[1e6], [1.0], [0.0]]
        ),  # the first step's reward is large and not read
        loss_mask=torch.ones(3, 1),
        response_mask=torch.ones(3, 1, dtype=torch.int64),
    )
    batch.metadata = {"uids": ["a", "a", "a"], "is_last_step": [False, True, True]}
    results = []
    for pad_size in (0, 5):
        padded = pad_batch(batch, pad_size)
        got = group_advantage(
            padded["rewards"],
            padded.metadata["uids"],
            is_last_step=padded.metadata["is_last_step"],
            response_mask=padded["response_mask"],
            estimator=estimator,
        )
        trained = padded["loss_mask"] != 0
        results.append((got[trained], normalize_advantages(got, trained.to(torch.uint8))[trained]))
    for plain, with_padding in zip(*results, strict=True):
        assert torch.equal(plain, with_padding)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_dimension_of_size_1_may_have_any_stride(num_rows: int) -> None:
    column = torch.randn(1, 5).t()[:num_rows]  # contiguous for torch, with strides (1, 5)
    batch = TensorBatch(sequences=column, attention_mask=torch.ones(num_rows, 1))
    batch.metadata = {}
    padded = pad_batch(batch, 2)
    assert torch.equal(padded["sequences"], torch.cat([column, column[:1], column[:1]]))
