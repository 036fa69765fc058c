"""A run whose gradients are no longer finite ends with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from helpers._training import fill, settings, train

from skyrl_fast.train.divergence import DivergedError, DivergenceWatch
from skyrl_fast.train.output.loggers import read_metrics

pytestmark = pytest.mark.spec("run.diverged")


def test_single_skipped_steps_are_accidents() -> None:
    watch = DivergenceWatch()
    for _ in range(20):
        watch.see(1, 2)  # every second step
    watch.see(0, 10)
    watch.see(5, 5)
    with pytest.raises(DivergedError, match="6 of the last 10 optimizer steps were skipped"):
        watch.see(1, 1)


def test_run_with_a_huge_learning_rate_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fill(tmp_path, monkeypatch, num_prompts=8)
    config = settings(folder, "run", "trainer.epochs=20", "trainer.policy.optimizer_config.lr=1e30")
    with pytest.raises(DivergedError, match=r"optimizer_config\.lr"):
        train(config)
    rows = read_metrics(folder / "run/metrics.jsonl")
    assert max(row["step"] for row in rows) < 12  # of 80
    assert (folder / "run/checkpoints").is_dir()
