"""bench.growth: its steps have the sizes asked for, and its exponents are slopes."""

from __future__ import annotations

import pytest

from bench.growth import Sizes, exponent, measure, table, trajectories_of


def test_sizes() -> None:
    sizes = Sizes(trajectories=6, turns=3, tokens=600, group=2)
    sampled = trajectories_of(sizes)
    assert len(sampled) == 6 and len({t.uid for t in sampled}) == 3
    assert all(len(t.steps) == 3 for t in sampled)
    assert 400 < len(sampled[0].steps[-1].prompt_token_ids) <= 600


def test_exponent() -> None:
    assert exponent([1, 2, 4, 8], [9.0, 4.0, 16.0, 64.0]) == pytest.approx(2)


def test_every_phase_is_measured() -> None:
    cases = {
        size: measure(Sizes(trajectories=size, turns=2, tokens=64, group=2)) for size in (4, 8)
    }
    lines = table("trajectories", cases).splitlines()
    assert len(lines) == 3 + len(cases[4].seconds) == 10
    assert min(cases[8].seconds.values()) > 0
