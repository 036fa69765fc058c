"""The GPU benches with tiny sizes on emulated kernels; the timings are meaningless."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bench.baselines.padded_rows import row_bounds, varlen_attention
from bench.gpu import batch_cases, cases, peers, report
from bench.gpu.case import OURS, Case, within
from bench.gpu.timing import Ceilings, Stopwatch
from skyrl_fast import group_advantage
from skyrl_fast.ops.prefix_tree.attention import plan_tree_attention, tree_attention
from skyrl_fast.train.model import tree_forward

ROOT = Path(__file__).resolve().parents[2]
CEILINGS = Ceilings(1e12, 1e10, 0.005)
WATCH = Stopwatch("cpu", rounds=1, flush_bytes=8)


def test_peers_are_not_compiled_by_inductor_without_a_gpu() -> None:
    assert peers.compile_backend(has_gpu=False) == "aot_eager"
    assert peers.compile_backend(has_gpu=True) == "inductor"


@pytest.mark.slow
def test_every_case_runs(emulated_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = {"F.cross_entropy": peers.LOGPROB["F.cross_entropy"]}
    monkeypatch.setattr(peers, "LOGPROB", keep)  # no compiling here
    for losses in (peers.PPO, peers.PPO_K3):
        monkeypatch.delitem(losses, "torch.compile TRL formulation")
    size = replace(cases.TINY, tree_shapes=("search",), tree_divisor=300)
    *_, found = report.measured("cpu", size)
    ours = [e for e in found["entries"] if e["contender"] == OURS]
    groups = {e["group"] for e in found["entries"]}
    assert len(ours) == len(groups) and all("median_ms" in e for e in ours)
    assert all(e["error"] < 5e-3 for e in ours if "error" in e)  # of bfloat16 gradients
    unchecked = {e["group"].split(" 6")[0].split(":")[0] for e in ours if "error" not in e}
    # Its gradients are checked in earlier groups; steps are compared with the memory plan.
    assert unchecked == {"linear_logprob forward", "optimizer step"}
    trees = [e for e in found["entries"] if e["group"].startswith("prefix tree: agents")]
    assert {e["error"] < 1e-3 for e in trees if "tokens" in e} == {True}
    others = [e for e in found["entries"] if "formulation" in e["contender"]]
    assert len(others) == 3 and all(e["error"] < 1e-5 for e in others)
    text = report.table(found)
    assert "no measurement" in text and "| F.cross_entropy |" in text
    for work in (
        "logprob forward",
        "masked_logprob_loss",
        "linear_logprob",
        "pack",
        "group_adv",
        "policy_loss PPO",
    ):
        assert any(work in group for group in groups)


def test_wrong_advantage_in_any_row_is_detected() -> None:
    def wrong(*arguments: Any, backend: str, **options: Any) -> torch.Tensor:
        result = group_advantage(*arguments, backend=backend, **options)
        if backend == "native":
            result[-1, -1] += 0.01
        return result

    made = list(batch_cases.advantage_cases(cases.TINY.batch, "cpu", "g", compute=wrong))
    entries = [report.entry(case, WATCH, CEILINGS) for case in made]
    assert len(entries) == 2 and all("wrong by 0.01" in entry["skipped"] for entry in entries)


def test_own_failure_sets_the_exit_status() -> None:
    def wrong() -> None:
        raise ValueError("x")

    made = (
        Case("g", "peer", wrong, 0.0),
        Case("g", OURS, wrong, 0.0),
        Case("g", f"{OURS} Triton", lambda: None, 0.0),
    )
    entries = [report.entry(case, WATCH, CEILINGS) for case in made]
    with pytest.raises(SystemExit, match=r"ours failed: g, skyrl_fast$"):
        report.exit_if_ours_failed(entries)
    report.exit_if_ours_failed([entries[0], entries[2]])


@pytest.mark.parametrize("wrong", [0.1, float("nan")])
def test_wrong_result_is_not_timed(wrong: float) -> None:
    case = Case("g", "peer", lambda: None, 0.0, check=lambda: within(wrong, 0.01))
    found = report.entry(case, WATCH, CEILINGS)
    assert found["skipped"].startswith("fails: ValueError: wrong by") and "median_ms" not in found


def test_parts_of_a_run_are_merged(tmp_path: Path) -> None:
    def saved(machine: str, group: str, ms: float) -> list[tuple[str, float]]:
        entry = {"group": group, "contender": "x", "skipped": "", "floor_ms": ms}
        part = {"machine": machine, "ceilings": asdict(CEILINGS), "entries": [entry]}
        report.save(part, tmp_path)
        entries = json.loads((tmp_path / "gpu.json").read_text())["entries"]
        return [(e["group"], e["floor_ms"]) for e in entries]

    assert saved("A", "pack", 1.0) == [("pack", 1.0)]
    assert saved("A", "logprob", 2.0) == [("pack", 1.0), ("logprob", 2.0)]
    assert saved("A", "pack", 3.0) == [("logprob", 2.0), ("pack", 3.0)]
    assert saved("B", "pack", 4.0) == [("pack", 4.0)]  # results of two machines are not mixed
    assert "## pack" in (tmp_path / "gpu.md").read_text()


@pytest.mark.peers
def test_installed_peers_agree() -> None:
    """In Triton's interpreter; QuACK and cut cross-entropy run only on a GPU."""
    command = [sys.executable, "-c", PEERS_PROGRAM]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    entries, tried = json.loads(done.stdout.splitlines()[-1]), []
    for module, contenders in {
        "trl": ("TRL", "TRL + gather", "TRL, masked", "TRL chunked", "TRL chunked + gather"),
        "verl": ("verl",),
        "flash_attn": ("flash-attn", "flash-attn + gather", "flash-attn, targets ignored"),
        "liger_kernel": ("Liger", "Liger + gather", "Liger, targets ignored", "Liger GRPO",
                         "Liger scaled", "Liger scaled + gather"),
    }.items():  # fmt: skip
        if importlib.util.find_spec(module) is None:
            continue
        tried.append(module)
        for contender in contenders:
            found = [e for e in entries if e["contender"] == contender]
            assert found and all("median_ms" in e for e in found), found
    if not tried:
        pytest.skip("no peer is installed")


PEERS_PROGRAM = """
import contextlib, json, torch
from bench.gpu import cases, report
torch.cuda.device = lambda index: contextlib.nullcontext()  # flash-attn names its device
*_, found = report.measured("cpu", cases.TINY, dtype=torch.float32)  # it does not support bfloat16
print(json.dumps(found["entries"]))
"""


def test_without_a_gpu_nothing_is_measured_or_saved(tmp_path: Path) -> None:
    if report.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="nothing was measured"):
        report.main(["--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_varlen_attention_of_rows_without_shared_prefixes() -> None:
    """One row at a time replaces torch's kernel, which runs only on a GPU."""

    def row_by_row(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu: torch.Tensor, *_: Any,
        window_size: tuple[int, int],
    ) -> torch.Tensor:  # fmt: skip
        assert window_size == (-1, 0) and query.dtype == key.dtype == value.dtype
        rows = []
        for begin, end in itertools.pairwise(cu.tolist()):
            parts = (x[begin:end].transpose(0, 1) for x in (query, key, value))
            rows.append(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(0, 1))
        return torch.cat(rows)

    with varlen_attention(row_by_row):
        for kind, lengths in (("flex", [100, 1, 155]), ("dense", [3, 1, 2]), ("dense", [1, 4, 1])):
            ends = torch.tensor(lengths).cumsum(0)
            parents = torch.arange(int(ends[-1])) - 1
            parents[[0, *ends[:-1].tolist()]] = -1
            last = ends.repeat_interleave(torch.tensor(lengths))
            plan = plan_tree_attention(parents.int(), last.int(), kind=kind)
            cu, longest = row_bounds(plan)
            assert cu.tolist() == [0, *ends.tolist()] and longest == max(lengths)
            query, key, value = (torch.randn(1, heads, len(last), 8) for heads in (4, 2, 2))
            with torch.autocast("cpu", torch.bfloat16):  # float32 queries with bfloat16 values
                got = tree_forward.tree_attention(query, key, value.bfloat16(), plan)
                want = tree_attention(query, key, value.bfloat16(), plan)
            torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)  # bfloat16
            del plan  # the next plan may reuse this one's memory
