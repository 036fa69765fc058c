"""Tokens that seeded requests sample on a CPU."""

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_fast.rollout.engine.vllm_patches.normalized_logprobs import (
    log_softmax,
    normalize_logprobs,
)
from skyrl_fast.rollout.engine.vllm_patches.seeded_sampling import (
    BLOCK,
    Numbers,
    draw_tokens,
    sample_by_inversion,
)

EXCLUDED = -torch.inf


def generators(*seeds: int) -> dict[int, torch.Generator]:
    return {row: torch.Generator().manual_seed(seed) for row, seed in enumerate(seeds)}


def log_probabilities(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log().float()


@pytest.mark.parametrize(
    ("drawn", "token"), [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (1 - 2**-53, 4)]
)
def test_a_number_becomes_the_word_whose_share_it_falls_into(drawn: float, token: int) -> None:
    """By hand: shares 0, 1/4, 0, 1/2, 1/4, 0; words without a share are never sampled."""
    shares = log_probabilities([0, 0.25, 0, 0.5, 0.25, 0])

    def draw(size: int, **_: Any) -> torch.Tensor:
        return torch.full((size,), drawn, dtype=torch.float64)

    assert draw_tokens(shares, generators(0), Numbers(draw)).tolist() == [token]


def test_frequencies_are_the_probabilities() -> None:
    rows = 20_000
    shares = torch.tensor([0.5, 0.2, 0.0, 0.15, 0.1, 0.04, 0.01])
    tokens = draw_tokens(shares.log().expand(rows, -1), generators(*range(rows)), Numbers())
    counts = torch.bincount(tokens, minlength=len(shares)).double()
    spread = (rows * shares * (1 - shares)).sqrt().clamp(min=1e-9)
    assert counts[2] == 0
    assert ((counts - rows * shares).abs() / spread)[shares > 0].max() < 5


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_of_a_large_vocabulary_are_exact(mode: str) -> None:
    """torch's log_softmax in float32 adds many unlikely words to a likely one, each rounded."""
    words = 151_936
    logits = torch.zeros(2, words)
    logits[:, 0] = 12.0
    exact = logits.double().log_softmax(-1)
    assert (logits.log_softmax(-1) - exact).abs().max() > 1e-4
    sampler = SimpleNamespace(compute_logprobs=None)
    draw = SimpleNamespace(forward=None, logprobs_mode="processed_logprobs")
    if mode == "raw_logprobs":
        assert normalize_logprobs(sampler)
        got = sampler.compute_logprobs(logits)
    else:
        assert sample_by_inversion(SimpleNamespace(topk_topp_sampler=draw))
        _, got = draw.forward(logits, generators(1, 2), None, None)
    assert got.dtype == torch.float32
    assert abs(got - exact).max() < 2e-6  # a rounding of values up to 12


def test_excluded_words_keep_no_probability() -> None:
    logits = torch.tensor([[1.0, EXCLUDED, 1.0]], dtype=torch.bfloat16)
    half = float(np.log(0.5))
    torch.testing.assert_close(log_softmax(logits), torch.tensor([[half, EXCLUDED, half]]))


@pytest.mark.parametrize("words", [1, 2, 1000, 151_936])
def test_tokens_depend_on_the_row_and_its_generator_alone(words: int) -> None:
    logprobs = torch.randn(5, words, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    together = draw_tokens(logprobs, generators(3, 1, 4, 1, 5), Numbers())
    again = generators(3, 1, 4, 1, 5)
    other_rows = {4 - row: again[row] for row in reversed(range(5))}
    backwards = draw_tokens(logprobs.flip(0), other_rows, Numbers())
    assert backwards.flip(0).tolist() == together.tolist()
    drawn = [torch.rand(1, generator=g, dtype=torch.float64).item() for g in generators(3).values()]
    cumulative = np.exp(logprobs[0].double().numpy()).cumsum()
    assert together[0] == np.searchsorted(cumulative, drawn[0] * cumulative[-1], side="right")


def test_seeded_rows_are_the_same_next_to_rows_without_a_seed() -> None:
    logprobs = torch.randn(200, 50).log_softmax(-1)
    alone = draw_tokens(logprobs[::2], generators(*range(100)), Numbers())
    mixed = {2 * row: generator for row, generator in generators(*range(100)).items()}
    # Twice, with the same seeds and another state of the global generator.
    copies = [{row: g.clone_state() for row, g in mixed.items()} for _ in "ab"]
    together = [draw_tokens(logprobs, copy, Numbers()) for copy in copies]
    for tokens in together:
        assert tokens[::2].tolist() == alone.tolist()
    assert not torch.equal(together[0][1::2], together[1][1::2])  # by the global generator


def test_a_generators_numbers_are_its_own_one_by_one() -> None:
    """Whatever other requests do, and after steps without it."""
    numbers = Numbers()
    one, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    got: list[float] = []
    for step in range(2 * BLOCK + 3):
        if step % 3 == 0:
            numbers.next(other)
        got.append(numbers.next(one))
    generator = torch.Generator().manual_seed(1)
    assert got == [
        torch.rand(1, generator=generator, dtype=torch.float64).item() for _ in range(len(got))
    ]
    del one, other
    gc.collect()
    assert len(numbers) == 0  # those of requests that have ended are gone


def test_nan_is_a_word_of_the_vocabulary() -> None:
    tokens = draw_tokens(torch.full((1, 4), torch.nan), generators(0), Numbers())
    assert 0 <= int(tokens) < 4


def test_classes_without_such_a_sampler_are_unchanged() -> None:
    sample_by_inversion(object())


@pytest.mark.vllm
@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits", "raw_logprobs"])
def test_top_k_and_requests_without_seeds(mode: str) -> None:
    from vllm.v1.sample.sampler import Sampler

    def usual(logits: Any, generators: Any, k: Any, p: Any) -> str:
        return "vLLM's"

    sampler = SimpleNamespace(topk_topp_sampler=Sampler(mode).topk_topp_sampler)
    sampler.topk_topp_sampler.forward = usual
    sample_by_inversion(sampler)
    forward = sampler.topk_topp_sampler.forward
    logits = torch.tensor([[0.0, 5.0, 1.0], [0.0, 1.0, 2.0]])
    assert forward(logits, {}, None, None) == "vLLM's"
    only_best = torch.tensor([1, 1])
    tokens, values = forward(logits.clone(), generators(7, 8), only_best, None)
    assert tokens.tolist() == [1, 2]
    if mode == "raw_logprobs":
        assert values is None
    else:
        best = {"processed_logprobs": [0.0, 0.0], "processed_logits": [5.0, 2.0]}[mode]
        assert values.max(dim=-1).values.tolist() == best
        assert values.isneginf().sum() == 4
