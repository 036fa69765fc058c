"""Every metric that a run writes has an entry in the table, and every entry is written by a run."""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _training import fill, settings, train

from scripts import metrics_page
from skyrl_fast.rollout.engine.weights.probe import ProbeDifference, WeightSyncReport
from skyrl_fast.train.flow import vllm_rollouts
from skyrl_fast.train.memory.peak import PeakMemory
from skyrl_fast.train.model.row_layout import LayoutCosts
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.output.metric_table import AGENT, ENGINE, GPU, LAYOUTS, METRICS, find_metric

A = "trainer.algorithm"
CORRECTION = f"{A}.off_policy_correction"
RUNS = {
    "plain": [f"{A}.zero_variance_filter=true"],
    "async": ["trainer.fully_async.enabled=true", f"{CORRECTION}.tis_ratio_type=token"],
    "critic": [f"{A}.advantage_estimator=gae", "trainer.critic.model.path={folder}/model"],
    "kl": [f"{A}.use_kl_loss=true", "trainer.rows=merged", f"{A}.observation_loss_coef=0.1"],
    "kl in reward": [f"{A}.use_kl_in_reward=true", f"{CORRECTION}.tis_ratio_type=sequence"],
    "tree": [
        "trainer.row_layout=tree",
        f"{CORRECTION}.sequence_mask_metric=geometric",
        f"{CORRECTION}.token_mask_is_threshold_low=0.5",
        f"{CORRECTION}.outlier_token_is_threshold_low=0.1",
    ],
    "dynamic sampling": [
        f"{A}.dynamic_sampling.type=replace",
        "generator.apply_overlong_filtering=true",
        "generator.zero_reward_on_non_stop=true",
        "trainer.epochs=8",
        "trainer.max_training_steps=1",
        "generator.n_samples_per_prompt=16",
    ],
    "several data sets": [
        "data.train_data=[{folder}/train.jsonl, {folder}/val.jsonl]",
        "data.mixture={{train: 1, val: 1}}",
    ],
}


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the names of all metrics of one run of each kind."""
    folder = tmp_path_factory.mktemp("metrics")
    names: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        fill(folder, patch, num_prompts=8)
        for name, overrides in RUNS.items():
            changes = [text.format(folder=folder) for text in overrides]
            config = settings(folder, name.replace(" ", "_"), "trainer.epochs=1", *changes)
            for row in read_metrics(train(config).metrics):
                names |= row.keys() - {"step"}
    return names


@pytest.mark.spec("metrics.table")
def test_every_reported_metric_has_an_entry(reported: set[str]) -> None:
    assert sorted(name for name in reported if find_metric(name) is None) == []


def test_every_entry_is_reported(reported: set[str]) -> None:
    # Those of an environment.
    reported = reported | {"environment/score", "eval/all/environment/score"}
    absent = [m.name for m in METRICS if not m.where and not any(map(m.matches, reported))]
    assert absent == []


def test_entries_of_an_engine_are_its_metrics() -> None:
    state = SimpleNamespace(
        _runner=SimpleNamespace(faults=Counter()),
        _pool=SimpleNamespace(faults=Counter()),
        _environments=SimpleNamespace(num_abandoned=0),
        _interrupted=0,
        _agent=None,
    )
    faults = vllm_rollouts.VllmRollouts.faults(state)  # type: ignore[arg-type]
    report = WeightSyncReport(0.1, 0.2, ProbeDifference(0.0, 0.0, 0.0, 1.0), 0.0)
    sync = vllm_rollouts.sync_metrics(report, {0: report, 1: report})
    assert sync.keys() - vllm_rollouts.sync_metrics(report, {0: report}).keys() == {
        f"sync/{name}_of_engine_{n}" for name in ("update_seconds", "num_bytes") for n in (0, 1)
    }
    names = {f"faults/{name}" for name in faults} | {re.sub(r"_\d$", "_{n}", name) for name in sync}
    names |= {"timing/engine_idle", "timing/engine_idle_share", "generate/prefix_cache_share"}
    assert {metric.name for metric in METRICS if metric.where == ENGINE} == names


def test_entries_of_layouts_are_their_costs() -> None:
    names = LayoutCosts(0.0, 0.0, 0.0, 0.0).metrics().keys()
    assert {metric.name for metric in METRICS if metric.where == LAYOUTS} == names


def test_entries_of_an_agent_are_its_metrics() -> None:
    pytest.importorskip("starlette")
    from skyrl_fast.gateway.server import FAULTS
    from skyrl_fast.gateway.session import COUNTS

    names = {f"faults/{name}" for name in FAULTS} | {f"environment/{name}" for name in COUNTS}
    names.remove("environment/unparsed_tool_calls")  # of environments, too
    assert {metric.name for metric in METRICS if metric.where == AGENT} == names


def test_entries_of_a_gpu_are_its_metrics() -> None:
    counters = SimpleNamespace(
        max_memory_allocated=lambda device: 0,
        max_memory_reserved=lambda device: 0,
        reset_peak_memory_stats=lambda device: None,
    )
    names = PeakMemory(torch.device("cuda"), counters=counters).metrics().keys()
    assert {metric.name for metric in METRICS if metric.where == GPU} == names


def test_entries_differ_and_are_complete() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(metric.meaning for metric in METRICS)
    assert find_metric("generate/max_num_turns").name == "generate/{spread}_num_turns"  # type: ignore[union-attr]
    assert find_metric("generate/median_num_turns") is None


def test_page_is_up_to_date() -> None:
    text = Path(metrics_page.PAGE).read_text(encoding="utf-8")
    assert text == metrics_page.page(), "run python -m scripts.metrics_page"
