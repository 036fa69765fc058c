"""gae, reinforce_plus_plus: docs/spec.md section 9."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast import gae, reinforce_plus_plus

NAN = float("nan")
CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # float32 results of float64 chains of values up to about 100

# One trajectory of two steps. Step 0: two trained tokens and an observation that came with a
# reward. Step 1: one trained token and an appended end token that carries the reward.
REWARDS = torch.tensor([0.0, 1.0, 2.0, 0.0, 4.0])
VALUES = torch.tensor([1.0, 2.0, NAN, 4.0, NAN])
MASK = torch.tensor([1, 1, 0, 1, 0])
CU = torch.tensor([0, 3, 5])
LAST = [False, True]

# From the end. Token 3: r = 0 + 4, delta = 4 - 4. Token 1: r = 1 + 2, V' = 4. Token 0: V' = 2.
BY_HAND = {
    (1.0, 1.0): ([6.0, 5.0, 0.0, 0.0, 0.0], [7.0, 7.0, 0.0, 4.0, 0.0]),
    (0.5, 0.5): ([0.75, 3.0, 0.0, 0.0, 0.0], [1.75, 5.0, 0.0, 4.0, 0.0]),
    (1.0, 0.0): ([1.0, 5.0, 0.0, 0.0, 0.0], [2.0, 7.0, 0.0, 4.0, 0.0]),
    (0.0, 1.0): ([-1.0, 1.0, 0.0, 0.0, 0.0], [0.0, 3.0, 0.0, 4.0, 0.0]),
}


@pytest.mark.spec(
    "advantage.discount",
    "advantage.gae",
    "advantage.gae-untrained-tokens",
    "advantage.gae-worked-example",
)
@pytest.mark.parametrize("factors", BY_HAND)
def test_gae_by_hand(factors: tuple[float, float], backend: str) -> None:
    gamma, lambd = factors
    advantages, returns = gae(
        REWARDS,
        VALUES,
        is_last_step=LAST,
        loss_mask=MASK,
        cu_seqlens=CU,
        gamma=gamma,
        lambd=lambd,
        backend=backend,
    )
    assert (advantages.tolist(), returns.tolist()) == BY_HAND[factors]


@pytest.mark.spec("advantage.gae-row-reward")
def test_a_reward_per_row_comes_after_its_last_token(backend: str) -> None:
    per_token = gae(
        REWARDS, VALUES, is_last_step=LAST, loss_mask=MASK, cu_seqlens=CU, backend=backend
    )
    per_row = gae(
        torch.tensor([3.0, 4.0]),
        VALUES,
        is_last_step=LAST,
        loss_mask=MASK,
        cu_seqlens=CU,
        backend=backend,
    )
    # the same but for the 1.0 that token 1 got itself: its next trained token is in step 1 anyway
    for one, two in zip(per_token, per_row, strict=True):
        assert torch.equal(one, two)


@pytest.mark.spec("advantage.gae-reward-shift")
def test_the_reward_of_a_step_without_trained_tokens_goes_to_the_step_before(backend: str) -> None:
    got = reinforce_plus_plus(
        torch.tensor([1.0, 8.0, 2.0]),
        is_last_step=[False, False, True],
        loss_mask=torch.tensor([1, 1]),
        cu_seqlens=torch.tensor([0, 1, 1, 2]),
        gamma=0.5,
        normalize=False,
        backend=backend,
    )
    assert got.tolist() == [10.0, 2.0]


@pytest.mark.spec("advantage.gae-leading-reward")
def test_rewards_before_the_first_trained_token_are_nobodys(backend: str) -> None:
    got = reinforce_plus_plus(
        torch.tensor([1.0, 5.0, 2.0]),
        loss_mask=torch.tensor([1, 0, 1]),
        cu_seqlens=torch.tensor([0, 1, 3]),
        normalize=False,
        backend=backend,
    )
    assert got.tolist() == [1.0, 0.0, 2.0]


def test_lambda_and_gamma_one_is_return_minus_value(backend: str) -> None:
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.rand(2, 6, generator=generator).unbind()
    advantages, returns = gae(rewards, values, is_last_step=[False] * 5 + [True], backend=backend)
    to_go = rewards.flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(returns, to_go, **CLOSE)
    torch.testing.assert_close(advantages, to_go - values, **CLOSE)


@pytest.mark.spec("advantage.gae")
def test_linking_steps_equals_one_long_row(backend: str) -> None:
    generator = torch.Generator().manual_seed(2)
    rewards, values = torch.randn(2, 12, generator=generator).unbind()
    one = gae(rewards[None], values[None], gamma=0.9, lambd=0.8, backend=backend)
    three = gae(
        rewards,
        values,
        is_last_step=[False, False, True],
        cu_seqlens=torch.tensor([0, 5, 6, 12]),
        gamma=0.9,
        lambd=0.8,
        backend=backend,
    )
    for a, b in zip(one, three, strict=True):
        torch.testing.assert_close(a[0], b, **CLOSE)


@pytest.mark.spec("advantage.reinforce-plus-plus")
def test_reinforce_plus_plus_by_hand(backend: str) -> None:
    # rewards to go 3, 2 | 6 (the token that is not trained has none); mean 11 / 3
    rewards = torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 6.0]])
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]])
    plain = reinforce_plus_plus(rewards, loss_mask=mask, normalize=False, backend=backend)
    assert plain.tolist() == [[0.0, 3.0, 2.0], [0.0, 6.0, 0.0]]
    got = reinforce_plus_plus(rewards, loss_mask=mask, backend=backend)
    kept = torch.tensor([3.0, 2.0, 6.0])
    wanted = (kept - kept.mean()) / kept.std(correction=0)
    torch.testing.assert_close(got[mask == 1], wanted, **CLOSE)
    assert not got[mask == 0].any()


def test_low_variance_keeps_its_digits(backend: str) -> None:
    rewards = torch.tensor([4096.0, 4096.0, 4096.5])
    got = reinforce_plus_plus(rewards, backend=backend)
    root = math.sqrt(2)
    torch.testing.assert_close(got, torch.tensor([-1 / root, -1 / root, root]), **CLOSE)


def test_equal_returns_and_nothing_trained(backend: str) -> None:
    assert not reinforce_plus_plus(torch.full((4,), 0.5), backend=backend).any()
    nothing = torch.zeros(2, 3)
    advantages, returns = gae(
        nothing + 1, nothing * NAN, loss_mask=nothing, normalize=True, backend=backend
    )
    assert not advantages.any() and not returns.any()


def test_normalised_gae_keeps_its_returns(backend: str) -> None:
    args = {"is_last_step": LAST, "loss_mask": MASK, "cu_seqlens": CU, "backend": backend}
    plain, returns = gae(REWARDS, VALUES, **args)
    scaled, same = gae(REWARDS, VALUES, normalize=True, **args)
    kept = plain[MASK == 1]
    torch.testing.assert_close(
        scaled[MASK == 1], (kept - kept.mean()) / kept.std(correction=0), **CLOSE
    )
    assert torch.equal(returns, same)


@pytest.mark.spec("advantage.padding")
@pytest.mark.parametrize("op", ["gae", "reinforce_plus_plus"])
def test_padding_rows_and_padded_cells_change_nothing(op: str, backend: str) -> None:
    generator = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(2, 4, 6, generator=generator).unbind()
    mask = torch.rand(4, 6, generator=generator) > 0.4
    last = [False, True, False, True]

    def run(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, last: list[bool]):
        args = {"is_last_step": last, "loss_mask": mask, "gamma": 0.9, "backend": backend}
        if op == "gae":
            return gae(rewards, values, lambd=0.7, normalize=True, **args)
        return (reinforce_plus_plus(rewards, **args),)

    bare = run(rewards, values, mask, last)
    wide = [torch.nn.functional.pad(x, (3, 0, 0, 2)) for x in (rewards, values, mask)]
    wide[0][4:] = 1e6  # a copy of some rewarded row
    wide[1][4:] = NAN
    got = run(*wide, [*last, True, True])
    for a, b in zip(bare, got, strict=True):
        torch.testing.assert_close(b[:4, 3:], a, atol=1e-6, rtol=0)
        assert not b[4:].any() and not b[:, :3].any()


def test_empty_batch(backend: str) -> None:
    advantages, returns = gae(torch.zeros(0, 4), torch.zeros(0, 4), backend=backend)
    assert advantages.shape == returns.shape == (0, 4)
    assert reinforce_plus_plus(torch.zeros(0), backend=backend).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype, backend: str) -> None:
    args = {"is_last_step": LAST, "loss_mask": MASK.bool(), "cu_seqlens": CU, "backend": backend}
    wanted = gae(REWARDS, VALUES, **args)
    got = gae(REWARDS.to(dtype), VALUES.to(dtype), **args)
    for a, b in zip(wanted, got, strict=True):
        assert torch.equal(a, b) and b.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_mask_dtypes_and_strided_input(dtype: torch.dtype, backend: str) -> None:
    rewards, values = torch.arange(24.0).reshape(2, 3, 4).transpose(1, 2)
    mask = (torch.arange(12).reshape(3, 4).T % 3 > 0).to(dtype)
    args = {"is_last_step": [False, True, False, True], "backend": backend}
    got = gae(rewards, values, loss_mask=mask, **args)
    plain = gae(rewards.clone(), values.clone(), loss_mask=(mask != 0).clone(), **args)
    for a, b in zip(got, plain, strict=True):
        assert torch.equal(a, b)


BAD = [
    ({"is_last_step": [True, True, False]}, "is_last_step: expected True in the last row"),
    ({"is_last_step": [True]}, r"is_last_step: expected shape \(3,\)"),
    (
        {"rewards": torch.tensor([1.0, NAN, 0.0])},
        "rewards: expected finite numbers, but those of row 1",
    ),
    ({"rewards": torch.tensor([1.0, 0.0, float("-inf")])}, "those of row 2 sum to -inf"),
    ({"rewards": torch.tensor([1, 0, 0])}, "rewards: expected a floating-point tensor"),
    ({"rewards": torch.ones(4)}, "expected"),
    ({"gamma": -0.1}, "gamma: expected a number from 0 to 1, got -0.1"),
    ({"loss_mask": torch.ones(2)}, "loss_mask: expected"),
    ({"cu_seqlens": torch.tensor([0, 2, 1, 3])}, "cu_seqlens: expected"),
    ({"backend": "cuda"}, "backend: expected one of"),
]
BAD_GAE = [
    ({"values": torch.tensor([1.0, 0.0, NAN])}, "values: .* trained tokens.* row 2 has nan"),
    ({"values": torch.tensor([float("inf"), 0.0, 1.0])}, "values: .* trained tokens.* row 0"),
    ({"values": torch.ones(3, dtype=torch.int64)}, "values: expected a floating-point tensor"),
    ({"values": torch.ones(3, 2), "loss_mask": torch.ones(3)}, r"values: expected shape \(3,\)"),
    ({"lambd": 1.1}, "lambd: expected a number from 0 to 1, got 1.1"),
    (
        {"rewards": torch.ones(3, 2), "values": torch.ones(3, 4)},
        r"rewards: expected \(3,\) or \(3, 4\), got \(3, 2\)",
    ),
]


@pytest.mark.spec("advantage.bad-input", "advantage.gae-values")
@pytest.mark.parametrize(("change", "message"), BAD + BAD_GAE)
def test_bad_input_of_gae(change: dict, message: str, backend: str) -> None:
    args = {"rewards": torch.tensor([1.0, 0.0, 2.0]), "values": torch.zeros(3), "backend": backend}
    args |= change
    with pytest.raises(ValueError, match=f"gae: .*{message}"):
        gae(**args)


@pytest.mark.parametrize(
    ("change", "message"), [bad for bad in BAD if bad[0].keys() != {"rewards"} or len(bad[1]) > 9]
)
def test_bad_input_of_reinforce_plus_plus(change: dict, message: str, backend: str) -> None:
    args = {"rewards": torch.tensor([1.0, 0.0, 2.0]), "backend": backend} | change
    with pytest.raises(ValueError, match=f"reinforce_plus_plus: .*{message}"):
        reinforce_plus_plus(**args)


@st.composite
def chains(draw: st.DrawFn) -> dict:
    """Random trajectories with ragged responses and masks."""
    turns = draw(st.lists(st.integers(1, 4), min_size=1, max_size=8))  # rows per trajectory
    last = [k == n - 1 for n in turns for k in range(n)]
    cells = draw(
        st.lists(
            st.sampled_from([0, 1, 2, 31, 32, 33, 100]), min_size=len(last), max_size=len(last)
        )
    )
    cu = torch.tensor([0, *cells]).cumsum(0)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    total = int(cu[-1])
    size = total if draw(st.booleans()) else len(last)
    return {
        "rewards": torch.randn(size, generator=generator),
        "values": torch.randn(total, generator=generator),
        "is_last_step": last,
        "cu_seqlens": cu,
        "loss_mask": torch.rand(total, generator=generator) > draw(st.sampled_from([-1, 0.3, 2])),
    }


FACTORS = st.sampled_from([(1.0, 1.0), (0.99, 0.95), (0.0, 0.5), (1.0, 0.0)])


@given(chains(), FACTORS, st.booleans())
def test_gae_native_equals_reference(
    batch: dict, factors: tuple[float, float], normalize: bool
) -> None:
    gamma, lambd = factors
    native, plain = (
        gae(**batch, gamma=gamma, lambd=lambd, normalize=normalize, backend=backend)
        for backend in ("native", "torch")
    )
    for a, b in zip(native, plain, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@given(chains(), st.sampled_from([1.0, 0.9, 0.0]), st.booleans())
def test_reinforce_native_equals_reference(batch: dict, gamma: float, normalize: bool) -> None:
    batch.pop("values")
    native, plain = (
        reinforce_plus_plus(**batch, gamma=gamma, normalize=normalize, backend=backend)
        for backend in ("native", "torch")
    )
    torch.testing.assert_close(native, plain, **CLOSE)


@pytest.mark.spec("advantage.float64-sums")
def test_same_bits_whatever_the_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 4096, 512, generator=generator).unbind()
    mask = torch.rand(4096, 512, generator=generator) > 0.1
    last = [i % 3 == 2 or i == 4095 for i in range(4096)]
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            results.append(
                gae(
                    rewards,
                    values,
                    is_last_step=last,
                    loss_mask=mask,
                    gamma=0.99,
                    lambd=0.95,
                    normalize=True,
                )
            )
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert torch.equal(results[0][0], other[0]) and torch.equal(results[0][1], other[1])
