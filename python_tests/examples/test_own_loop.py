"""The loop in one file, on a real engine: it runs, and it learns."""

import asyncio
import math
import os
from pathlib import Path

import pytest

pytest.importorskip("skyrl_gym")

from examples import own_loop
from examples.quickstart.make_data import make_data
from examples.quickstart.run import prepare
from examples.quickstart.warm_start import warm_start
from skyrl_fast.train import load_config

SECONDS = 1200  # most of it makes the model, where it is not given

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(SECONDS)]


def curve_of(folder: Path, monkeypatch: pytest.MonkeyPatch, *, steps: int) -> list[float]:
    monkeypatch.chdir(folder)
    config = load_config(own_loop.SETTINGS, [f"trainer.run_path={folder / 'own_loop'}"])
    return asyncio.run(own_loop.train(config, steps))


@pytest.mark.ci
def test_the_loop_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Weights that the probe compares after each of three updates, of a model that is hardly warm.
    make_data(tmp_path / "quickstart" / "data", num_train=64, num_demonstrations=500)
    warm_start(tmp_path / "quickstart" / "data", tmp_path / "quickstart" / "model", num_steps=10)
    curve = curve_of(tmp_path, monkeypatch, steps=3)
    assert len(curve) == 3
    assert all(math.isfinite(reward) for reward in curve)


def test_the_loop_learns(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = os.environ.get("SKYRL_FAST_QUICKSTART")
    folder = Path(given) if given else tmp_path_factory.mktemp("own_loop")
    prepare(folder / "quickstart")
    curve = curve_of(folder, monkeypatch, steps=8)
    assert curve[0] < 0.5
    assert sum(curve[-3:]) / 3 > curve[0] + 0.15
