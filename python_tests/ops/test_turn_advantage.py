"""turn_level_returns, turn_group_advantage, gigpo_advantage: docs/spec.md section 9."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast import gigpo_advantage, turn_group_advantage, turn_level_returns

# float32 results of float64 sums of values up to about 100; a tiny deviation magnifies the order
# of a float64 sum, nothing more
CLOSE = {"atol": 1e-5, "rtol": 1e-5}

# Three trajectories of one group, of two, one and three turns.
REWARDS = torch.tensor([1.0, 2.0, 4.0, 0.0, 0.0, 6.0])
LAST = [False, True, True, False, False, True]
UIDS = ["a"] * 6


@pytest.mark.spec("advantage.turn-returns", "advantage.turn-worked-example")
@pytest.mark.parametrize(
    ("gamma", "wanted"),
    [
        (1.0, [3.0, 2.0, 4.0, 6.0, 6.0, 6.0]),
        (0.5, [2.0, 2.0, 4.0, 1.5, 3.0, 6.0]),
        (0.0, [1.0, 2.0, 4.0, 0.0, 0.0, 6.0]),
    ],
)
def test_returns_by_hand(gamma: float, wanted: list[float], backend: str) -> None:
    got = turn_level_returns(REWARDS, is_last_step=LAST, gamma=gamma, backend=backend)
    assert got.tolist() == wanted


@pytest.mark.spec(
    "advantage.turn-baseline", "advantage.episode-baseline", "advantage.turn-worked-example"
)
@pytest.mark.parametrize(
    ("baseline", "wanted"),
    [
        # turn 1 of the first: 2 - (0 + 6) / 2, because the second is over and has 0 there
        ("turn", [-2.0, -1.0, -0.5, 2.5, 5.0, 6.0]),
        # whole returns of the others: 5 for the first, 4.5 for the second, 3.5 for the third
        ("episode", [-2.0, -3.0, -0.5, 2.5, 2.5, 2.5]),
    ],
)
def test_group_advantage_by_hand(baseline: str, wanted: list[float], backend: str) -> None:
    got = turn_group_advantage(REWARDS, UIDS, is_last_step=LAST, baseline=baseline, backend=backend)
    assert got.tolist() == wanted


@pytest.mark.spec("advantage.turn-scale")
def test_scaling_is_one_number_per_group(backend: str) -> None:
    plain = turn_group_advantage(REWARDS, UIDS, is_last_step=LAST, backend=backend)
    scaled = turn_group_advantage(
        REWARDS, UIDS, is_last_step=LAST, scale_by_std=True, backend=backend
    )
    torch.testing.assert_close(scaled, plain / plain.square().mean().sqrt(), atol=1e-5, rtol=0)


def test_equal_returns_from_the_start_do_not_blow_up_later_turns(backend: str) -> None:
    got = turn_group_advantage(
        torch.tensor([1.0, 0.0, 0.0, 1.0]),
        ["a"] * 4,
        is_last_step=[False, True, False, True],
        scale_by_std=True,
        backend=backend,
    )
    root = math.sqrt(2)
    torch.testing.assert_close(got, torch.tensor([0.0, -root, 0.0, root]), atol=1e-5, rtol=0)


@pytest.mark.spec("advantage.episode-is-rloo")
def test_only_the_end_rewarded_is_rloo(backend: str) -> None:
    from skyrl_fast import group_advantage

    rewards = torch.tensor([0.0, 3.0, 1.0, 0.0, 0.0, 6.0])
    got = turn_group_advantage(
        rewards, UIDS, is_last_step=LAST, baseline="episode", backend=backend
    )
    rloo = group_advantage(rewards, UIDS, is_last_step=LAST, estimator="rloo", backend=backend)
    torch.testing.assert_close(got, rloo, **CLOSE)


@pytest.mark.spec("advantage.turn-group-of-one")
@pytest.mark.parametrize("baseline", ["turn", "episode"])
@pytest.mark.parametrize("scale", [False, True])
def test_group_of_one_has_nothing_to_compare_with(baseline: str, scale: bool, backend: str) -> None:
    got = turn_group_advantage(
        torch.tensor([3.0, 4.0]),
        ["a", "a"],
        is_last_step=[False, True],
        baseline=baseline,
        scale_by_std=scale,
        backend=backend,
    )
    assert got.tolist() == [0.0, 0.0]


# --- the baseline keeps the gradient's mean ------------------------------------------------------

STOP, GO = 0.35, 0.65  # turn 0; whoever goes on chooses at turns 1 and 2 between two actions
LEFT = 0.25
# A trajectory: its probability, its rewards, and the gradient of each turn's log-probability by the
# logits of (stop, left at turn 1, left at turn 2).
TRAJECTORIES = [
    (STOP, [2.0], [[1 - STOP, 0.0, 0.0]]),
    *(
        (
            GO * (LEFT if one else 1 - LEFT) * (LEFT if two else 1 - LEFT),
            [0.5, 3.0 if one else -1.0, 1.0 if one == two else 5.0],
            [[-STOP, 0.0, 0.0], [0.0, one - LEFT, 0.0], [0.0, 0.0, two - LEFT]],
        )
        for one in (True, False)
        for two in (True, False)
    ),
]


def true_gradient() -> torch.Tensor:
    total = torch.zeros(3, dtype=torch.float64)
    for probability, rewards, scores in TRAJECTORIES:
        for k, score in enumerate(scores):
            total += probability * sum(rewards[k:]) * torch.tensor(score, dtype=torch.float64)
    return total


def mean_gradient(advantage: object, size: int = 3) -> torch.Tensor:
    """The estimate's mean over all groups of `size` trajectories: every one is visited."""
    total = torch.zeros(3, dtype=torch.float64)
    for group in itertools.product(TRAJECTORIES, repeat=size):
        probability = math.prod(p for p, _, _ in group)
        rewards = torch.tensor([r for _, own, _ in group for r in own])
        last = [k + 1 == len(own) for _, own, _ in group for k in range(len(own))]
        values = advantage(rewards, last)  # type: ignore[operator]
        scores = torch.tensor([s for _, _, own in group for s in own], dtype=torch.float64)
        total += probability / size * (values.double()[:, None] * scores).sum(0)
    return total


def survivors_only(rewards: torch.Tensor, last: list[bool]) -> torch.Tensor:
    """What is not done: minus the mean over those that reached the turn."""
    value = turn_level_returns(rewards, is_last_step=last)
    turn, result = [], value.clone()
    for end in [True, *last[:-1]]:
        turn.append(0 if end else turn[-1] + 1)
    for k in set(turn):
        at = torch.tensor(turn) == k
        result[at] -= value[at].mean()
    return result


@pytest.mark.spec("advantage.turn-unbiased")
@pytest.mark.parametrize("baseline", ["turn", "episode"])
def test_the_baseline_does_not_bias_the_gradient(baseline: str, backend: str) -> None:
    if backend == "torch":
        pytest.skip("equal to native by other tests; slow here")
    got = mean_gradient(
        lambda rewards, last: turn_group_advantage(
            rewards, ["a"] * len(last), is_last_step=last, baseline=baseline
        )
    )
    torch.testing.assert_close(got, true_gradient(), atol=1e-6, rtol=0)


def test_normalising_over_survivors_does() -> None:
    ratio = mean_gradient(survivors_only) / true_gradient()
    # all three take part in turn 0: (n - 1) / n of the gradient. At later turns fewer do.
    assert ratio[0] == pytest.approx(2 / 3, abs=1e-5)
    assert ratio[1] < 0.6 and ratio[2] < 0.6


# --- GiGPO -------------------------------------------------------------------------------------


def gigpo(**changes: object) -> torch.Tensor:
    """Two trajectories that meet in the hall: rewards 0, 1, 3 and 0, 0."""
    args: dict = {
        "rewards": torch.tensor([0.0, 1.0, 3.0, 0.0, 0.0]),
        "group_ids": ["a"] * 5,
        "anchor_ids": ["door", "hall", "hall", "door", "hall"],
        "is_last_step": [False, False, True, False, True],
        "scale_by_std": False,
    }
    args |= changes
    return gigpo_advantage(**args)


@pytest.mark.spec("advantage.every-reward", "advantage.gigpo")
def test_gigpo_by_hand(backend: str) -> None:
    # returns to go 4, 4, 3 and 0, 0. Episodes 4 and 0: +2, -2. Door 4, 0: mean 2. Hall 4, 3, 0.
    third = 7 / 3
    wanted = torch.tensor([2 + 2, 2 + 4 - third, 2 + 3 - third, -2 - 2, -2 - third])
    torch.testing.assert_close(gigpo(backend=backend), wanted, **CLOSE)


@pytest.mark.spec("advantage.gigpo-episode", "advantage.gigpo-step")
def test_gigpo_scaled_by_hand(backend: str) -> None:
    half_root = 1 / math.sqrt(2)
    deviation = torch.tensor([4.0, 3.0, 0.0]).std()
    hall = (torch.tensor([4.0, 3.0, 0.0]) - 7 / 3) / deviation
    wanted = torch.tensor(
        [2, 1 + hall[0] / half_root, 1 + hall[1] / half_root, -2, -1 + hall[2] / half_root]
    )
    got = gigpo(scale_by_std=True, backend=backend)
    torch.testing.assert_close(got, wanted * half_root, **CLOSE)


def test_gigpo_weight_and_discount(backend: str) -> None:
    # gamma 0: the step's own reward. Door 0, 0; hall 1, 3, 0 with mean 4 / 3
    got = gigpo(gamma=0.0, step_advantage_w=0.5, backend=backend)
    wanted = torch.tensor([2.0, 2 - 1 / 6, 2 + 5 / 6, -2.0, -2 - 2 / 3])
    torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.spec("advantage.gigpo-single-visit")
def test_gigpo_state_seen_once_has_no_step_advantage(backend: str) -> None:
    got = gigpo(anchor_ids=[1, 2, 3, 4, 5], backend=backend)
    assert got.tolist() == [2.0, 2.0, 2.0, -2.0, -2.0]


@pytest.mark.spec("advantage.gigpo-group-states")
def test_gigpo_same_state_in_another_group_is_another_state(backend: str) -> None:
    one = gigpo(backend=backend)
    rewards = torch.tensor([0.0, 1.0, 3.0, 0.0, 0.0])
    got = gigpo_advantage(
        torch.cat([rewards, rewards + 7]),
        ["a"] * 5 + ["b"] * 5,
        ["door", "hall", "hall", "door", "hall"] * 2,
        is_last_step=[False, False, True, False, True] * 2,
        scale_by_std=False,
        backend=backend,
    )
    torch.testing.assert_close(got[:5], one, **CLOSE)


def test_gigpo_one_turn_is_grpo_twice(backend: str) -> None:
    from skyrl_fast import group_advantage

    rewards = torch.tensor([1.0, 0.0, 4.0])
    got = gigpo_advantage(rewards, ["a"] * 3, [7, 7, 7], step_advantage_w=0.5, backend=backend)
    grpo = group_advantage(rewards, ["a"] * 3, backend=backend)
    torch.testing.assert_close(got, 1.5 * grpo, **CLOSE)


# --- all three -----------------------------------------------------------------------------------

OPS = {
    "turn_level_returns": lambda rewards, ids, anchors, **k: turn_level_returns(rewards, **k),
    "turn_group_advantage": lambda rewards, ids, anchors, **k: turn_group_advantage(
        rewards, ids, **k
    ),
    "gigpo_advantage": gigpo_advantage,
}
every_op = pytest.mark.parametrize("name", OPS)


@pytest.mark.spec("advantage.discount", "advantage.turn-mask")
@every_op
def test_token_rewards_are_summed_and_spread_by_the_rows_own_mask(name: str, backend: str) -> None:
    per_row = OPS[name](REWARDS, UIDS, UIDS, is_last_step=LAST, backend=backend)
    padded = torch.zeros(6, 4)
    padded[:, 1], padded[:, 3] = REWARDS - 1, 1.0
    mask = torch.tensor([[0, 1, 1, 1]] * 3 + [[0, 0, 0, 1]] * 3)
    got = OPS[name](padded, UIDS, UIDS, is_last_step=LAST, response_mask=mask, backend=backend)
    torch.testing.assert_close(got, per_row[:, None] * mask, **CLOSE)


@every_op
def test_ragged_rows_may_be_empty(name: str, backend: str) -> None:
    per_row = OPS[name](REWARDS, UIDS, UIDS, is_last_step=LAST, backend=backend)
    lengths = torch.tensor([2, 0, 1, 3, 0, 5])
    cu = torch.tensor([0, *lengths.cumsum(0).tolist()])
    got = OPS[name](REWARDS, UIDS, UIDS, is_last_step=LAST, cu_seqlens=cu, backend=backend)
    torch.testing.assert_close(got, torch.repeat_interleave(per_row, lengths), **CLOSE)


@pytest.mark.spec("advantage.padding")
@every_op
def test_padding_rows_change_nothing(name: str, backend: str) -> None:
    bare = OPS[name](REWARDS, UIDS, UIDS, is_last_step=LAST, backend=backend)
    rewards = torch.cat([REWARDS, torch.full((3,), 1e6)])
    uids = [*UIDS, "pad0", "pad1", "pad2"]
    anchors = [*UIDS, *UIDS[:3]]  # a copy of row 0 has row 0's state
    got = OPS[name](rewards, uids, anchors, is_last_step=[*LAST, True, True, True], backend=backend)
    assert torch.equal(got[:6], bare)


@every_op
def test_groups_need_not_be_adjacent(name: str, backend: str) -> None:
    rewards = torch.tensor([1.0, 5.0, 0.0, 7.0])
    mixed = OPS[name](rewards, ["a", "b", "a", "b"], [0] * 4, backend=backend)
    order = [0, 2, 1, 3]
    sorted_ = OPS[name](rewards[order], ["a", "a", "b", "b"], [0] * 4, backend=backend)
    torch.testing.assert_close(mixed[order], sorted_, **CLOSE)


@every_op
def test_empty_batch(name: str, backend: str) -> None:
    mask = torch.zeros(0, 4)
    got = OPS[name](torch.zeros(0, 4), [], [], response_mask=mask, backend=backend)
    assert got.shape == (0, 4)


@pytest.mark.spec("advantage.float64-sums")
@every_op
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_reward_dtypes(name: str, dtype: torch.dtype, backend: str) -> None:
    wanted = OPS[name](REWARDS, UIDS, UIDS, is_last_step=LAST, backend=backend)
    got = OPS[name](REWARDS.to(dtype), UIDS, UIDS, is_last_step=LAST, backend=backend)
    assert torch.equal(got, wanted)
    assert got.dtype == torch.float32


@every_op
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_mask_dtypes_and_strided_input(name: str, dtype: torch.dtype, backend: str) -> None:
    mask = (torch.arange(24).reshape(6, 4) % 3 > 0).to(dtype)
    rewards = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)).T
    got = OPS[name](rewards, UIDS, UIDS, is_last_step=LAST, response_mask=mask, backend=backend)
    rows = OPS[name](rewards.sum(1), UIDS, UIDS, is_last_step=LAST, backend=backend)
    torch.testing.assert_close(got, rows[:, None] * mask, **CLOSE)


BAD = [
    ({"is_last_step": [True, True, False]}, "is_last_step: expected True in the last row"),
    ({"is_last_step": [True]}, r"is_last_step: expected shape \(3,\)"),
    ({"rewards": torch.tensor([1.0, float("nan"), 0.0])}, "those of row 1 sum to"),
    ({"rewards": torch.tensor([1.0, 0.0, float("inf")])}, "those of row 2 sum to"),
    ({"rewards": torch.tensor([1, 0, 0])}, "rewards: expected a floating-point tensor"),
    ({"gamma": 1.5}, "gamma: expected a number from 0 to 1, got 1.5"),
    ({"gamma": float("nan")}, "gamma: expected a number from 0 to 1"),
    ({"response_mask": torch.ones(2, 5)}, "response_mask: expected"),
    ({"cu_seqlens": torch.tensor([0, 2, 1, 3])}, "cu_seqlens: expected"),
    ({"backend": "cuda"}, "backend: expected one of"),
]


@pytest.mark.spec("advantage.bad-input")
@every_op
@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input_is_refused_by_name(name: str, change: dict, message: str, backend: str) -> None:
    args = {"rewards": torch.tensor([1.0, 0.0, 2.0]), "backend": backend} | change
    with pytest.raises(ValueError, match=f"{name}: .*{message}"):
        OPS[name](args.pop("rewards"), ["a"] * 3, ["s"] * 3, **args)


@pytest.mark.parametrize("name", ["turn_group_advantage", "gigpo_advantage"])
def test_two_groups_in_one_trajectory(name: str, backend: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: group_ids: expected one id .* row 0"):
        OPS[name](
            torch.ones(2), ["a", "b"], ["s", "s"], is_last_step=[False, True], backend=backend
        )


def test_ids_of_other_types_and_options_out_of_range() -> None:
    ones = torch.ones(2)
    with pytest.raises(
        TypeError, match="gigpo_advantage: anchor_ids: expected strings or ints, but"
    ):
        gigpo_advantage(ones, ["a", "a"], [1.5, 2.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"anchor_ids: expected one id per row \(2\), got 3"):
        gigpo_advantage(ones, ["a", "a"], [1, 2, 3])
    with pytest.raises(ValueError, match="step_advantage_w: expected at least 0, got -1"):
        gigpo_advantage(ones, ["a", "a"], [1, 2], step_advantage_w=-1)
    with pytest.raises(ValueError, match="baseline: expected one of"):
        turn_group_advantage(ones, ["a", "a"], baseline="mean")


@st.composite
def batches(draw: st.DrawFn) -> dict:
    """Random trajectories of random groups, with ragged responses and few states."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=12))  # rows per trajectory
    groups = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    ids = [g for g, n in zip(groups, lengths, strict=True) for _ in range(n)]
    last = [k == n - 1 for n in lengths for k in range(n)]
    cells = draw(
        st.lists(st.sampled_from([0, 1, 2, 31, 32, 33]), min_size=len(ids), max_size=len(ids))
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    anchors = torch.randint(0, 4, (len(ids),), generator=generator)
    return {"ids": ids, "last": last, "cells": cells, "anchors": anchors, "generator": generator}


OPTIONS = [
    ("turn_level_returns", {}),
    ("turn_group_advantage", {}),
    ("turn_group_advantage", {"baseline": "episode", "scale_by_std": True}),
    ("turn_group_advantage", {"scale_by_std": True}),
    ("gigpo_advantage", {"step_advantage_w": 0.3}),
    ("gigpo_advantage", {"scale_by_std": False}),
]


@given(batches(), st.sampled_from(OPTIONS), st.sampled_from([1.0, 0.9, 0.0]), st.booleans())
def test_native_equals_reference(
    batch: dict, op: tuple[str, dict], gamma: float, per_token: bool
) -> None:
    name, options = op
    cu = torch.tensor([0, *batch["cells"]]).cumsum(0)
    size = int(cu[-1]) if per_token else len(batch["ids"])
    rewards = torch.randn(size, generator=batch["generator"])
    mask = torch.rand(int(cu[-1]), generator=batch["generator"]) > 0.3
    args = {
        "is_last_step": batch["last"],
        "cu_seqlens": cu,
        "response_mask": mask,
        "gamma": gamma,
        **options,
    }
    native, plain = (
        OPS[name](rewards, batch["ids"], batch["anchors"], backend=backend, **args)
        for backend in ("native", "torch")
    )
    torch.testing.assert_close(native, plain, **CLOSE)


@every_op
def test_same_bits_whatever_the_threads(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(4096, 512, generator=generator)
    mask = torch.ones(4096, 512, dtype=torch.uint8)
    last = [i % 3 == 2 or i == 4095 for i in range(4096)]
    ids, anchors = [i // 24 for i in range(4096)], [i % 5 for i in range(4096)]
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            results.append(
                OPS[name](rewards, ids, anchors, is_last_step=last, response_mask=mask, gamma=0.9)
            )
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], r) for r in results[1:])
