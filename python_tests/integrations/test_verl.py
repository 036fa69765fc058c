"""The adapters for verl, compared with the installed package."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from skyrl_fast.integrations import verl as for_verl
from skyrl_fast.integrations.source import fingerprint_with_calls

pytestmark = pytest.mark.spec("dropin.verl")

ROOT = Path(__file__).parents[2]
CLOSE = {"rtol": 2e-6, "atol": 2e-6}  # exp and sums of another order


@pytest.mark.parametrize("cell", [1, 16])  # written by index, and as blocks
def test_verl_functions_without_verl(cell: int) -> None:
    values = torch.arange(6.0 * cell).reshape(2, 3, cell)
    for mask in (
        torch.tensor([[0, 1, 1], [1, 1, 1]]),
        torch.tensor([[1, 1, 0], [1, 0, 0]]),
        torch.tensor([[0, 1, 0], [1, 0, 1]]),  # a padded prompt before a padded response; a hole
        torch.tensor([[0, 0, 0], [0, 0, 1]]),
    ):
        flat, indices, cu_seqlens, longest, lengths = for_verl.unpad_input(values, mask)
        assert torch.equal(flat, values[mask.bool()]) and longest == int(mask.sum(1).max())
        assert lengths.tolist() == mask.sum(1).tolist() and int(cu_seqlens[-1]) == len(flat)
        again = for_verl.pad_input(flat, indices, 2, 3)
        assert torch.equal(again, values * mask[..., None])


PADDING = """
def unpad_input(hidden_states, attention_mask):
    return choose()(hidden_states, attention_mask)


def choose():
    return lambda hidden_states, attention_mask: "original"
"""


@pytest.fixture
def fake_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package `verl` with an `unpad_input` of its own."""
    utilities = tmp_path / "verl" / "utils"
    utilities.mkdir(parents=True)
    (tmp_path / "verl" / "__init__.py").touch()
    (utilities / "__init__.py").touch()
    (utilities / "attention_utils.py").write_text(PADDING)
    original = {name: m for name, m in sys.modules.items() if name.partition(".")[0] == "verl"}
    for name in original:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("verl.utils.attention_utils")
    for_verl.uninstall()
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]
    sys.modules.update(original)


@pytest.mark.spec("dropin.verl-known-source")
@pytest.mark.parametrize("choice", ["choose", None])
def test_function_of_unknown_source_is_kept_with_a_warning(
    fake_verl: ModuleType, monkeypatch: pytest.MonkeyPatch, choice: str | None
) -> None:
    known = fingerprint_with_calls([fake_verl.unpad_input], "verl")
    monkeypatch.setitem(for_verl.KNOWN, "unpad_input", {known: "9.9"})
    mask = torch.ones(1, 2, dtype=torch.long)
    if choice is None:
        assert for_verl.install().row("unpad_input").state == "replaced"
        assert fake_verl.unpad_input(torch.ones(1, 2), mask)[3] == 2
        return
    monkeypatch.setattr(fake_verl, choice, lambda: lambda *inputs: "changed")
    with pytest.warns(for_verl.VerlFastWarning, match="unpad_input is not replaced: its source"):
        row = for_verl.install().row("unpad_input")
    assert row.state == "kept" and "differs from every version" in row.why
    assert fake_verl.unpad_input(torch.ones(1, 2), mask) == "changed"


@pytest.mark.peers
def test_verl_estimators() -> None:
    core = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed")
    assert for_verl.register() == ["skyrl_fast_grpo", "skyrl_fast_rloo", "skyrl_fast_maxrl"]
    for_verl.register()  # a second time is no error
    torch.manual_seed(0)
    rewards, mask = torch.zeros(12, 7), (torch.rand(12, 7) < 0.7).float()
    rewards[:, -1] = torch.randint(0, 2, (12,)).float()
    index = np.array([f"p{i // 4}" for i in range(12)], dtype=object)
    for name, original, norm in (
        ("grpo", core.compute_grpo_outcome_advantage, True),
        ("grpo", core.compute_grpo_outcome_advantage, False),
        ("grpo", core.compute_grpo_vectorized_outcome_advantage, True),
        ("rloo", core.compute_rloo_outcome_advantage, True),
    ):
        extras = {"norm_adv_by_std_in_grpo": norm} if name == "grpo" else {}
        want, _ = original(rewards.clone(), mask, index, **extras)
        ours = core.get_adv_estimator_fn(f"skyrl_fast_{name}")
        got, returns = ours(token_level_rewards=rewards, response_mask=mask, index=index, **extras)
        torch.testing.assert_close(got, want, **CLOSE)
        assert torch.equal(got, returns)


@pytest.mark.peers
def test_verl_logprobs_and_packing() -> None:
    functional = pytest.importorskip("verl.utils.torch_functional", reason="verl is not installed")
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 5, 200) * 3, torch.randint(0, 200, (3, 5))
    want = functional.logprobs_from_logits(logits, labels)
    torch.testing.assert_close(for_verl.logprobs_from_logits(logits, labels), want, **CLOSE)
    padding = pytest.importorskip("verl.utils.npu_flash_attn_utils", reason="no padding functions")
    values, mask = torch.randn(4, 6, 3), torch.zeros(4, 6, dtype=torch.int64)
    for row, (start, length) in enumerate(((0, 6), (4, 2), (0, 1), (1, 4))):
        mask[row, start : start + length] = 1  # as a prompt and a response: padded on both sides
    original, ours = padding.unpad_input(values, mask), for_verl.unpad_input(values, mask)
    for a, b in zip(original, ours, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    padded = padding.pad_input(original[0], original[1], 4, 6)
    assert torch.equal(for_verl.pad_input(ours[0], ours[1], 4, 6), padded)


@pytest.mark.parametrize("permuted", [False, True])
def test_logits_with_strides_that_kernels_do_not_read_are_handed_back(
    permuted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(for_verl.originals, "logprobs_from_logits", lambda *arguments: "verl's")
    strided = torch.zeros(3, 7, 5).transpose(1, 2)
    if permuted:
        strided = torch.zeros(2, 3, 4, 7).permute(1, 0, 2, 3)[:, :, ::2]
    labels = torch.zeros(strided.shape[:-1], dtype=torch.int64)
    assert for_verl.logprobs_from_logits(strided, labels) == "verl's"
    counts = for_verl.report().row("logprobs_from_logits").counts
    assert "logits with strides" in counts.last_reason


PROGRAM = """
import verl, sys
assert "verl.trainer.ppo.core_algos" not in sys.modules  # nothing was imported for it
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
get_adv_estimator_fn("skyrl_fast_grpo")
import verl.utils.torch_functional as functional
print(functional.logprobs_from_logits.__module__)
import torch
functional.logprobs_from_logits(torch.zeros(2, 5), torch.tensor([1, 2]))
"""


@pytest.mark.peers
@pytest.mark.spec("dropin.counted")
@pytest.mark.parametrize("door", ["entry point", "external module"])
def test_verls_own_doors(door: str, tmp_path: Path) -> None:
    pytest.importorskip("verl", reason="verl is not installed")
    folder = tmp_path / "skyrl_fast-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: skyrl-fast\nVersion: 0\n")
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."verl.plugins"]' in pyproject
    target = "skyrl_fast.integrations.verl_plugin"
    assert f'skyrl_fast = "{target}"' in pyproject
    environment = dict(os.environ)
    if door == "entry point":
        (folder / "entry_points.txt").write_text(f"[verl.plugins]\nskyrl_fast = {target}\n")
        environment["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    else:
        environment["VERL_USE_EXTERNAL_MODULES"] = "skyrl_fast.integrations.verl"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    line = done.stderr.splitlines()[-1]
    if door == "entry point":  # functions are replaced on request only
        assert done.stdout == "verl.utils.torch_functional\n"
        assert "0 calls; never called: skyrl_fast_grpo" in line
    else:
        assert done.stdout == "skyrl_fast.integrations.verl\n"
        assert "1 calls: logprobs_from_logits 1; never called: skyrl_fast_grpo" in line


@pytest.mark.peers
def test_functions_are_replaced_where_they_are_bound_and_restored() -> None:
    padding = pytest.importorskip("verl.workers.utils.padding", reason="verl is not installed")
    import verl.utils.attention_utils as home

    original, counts = home.unpad_input, for_verl.report().row("unpad_input").counts
    before = counts.calls, counts.handed_back
    report = for_verl.install()
    try:
        assert set(report.names("replaced")) >= {"unpad_input", "pad_input"}
        assert padding.unpad_input is home.unpad_input is for_verl.unpad_input
        values, mask = (
            torch.randn(3, 4, 2),
            torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0]]),
        )
        for got, want in zip(home.unpad_input(values, mask), original(values, mask), strict=True):
            assert torch.equal(got, want) if isinstance(got, torch.Tensor) else got == want
        home.unpad_input(values, mask, torch.zeros_like(mask))  # flash-attn's third argument
        assert (counts.calls, counts.handed_back) == (before[0] + 2, before[1] + 1)
        assert "too many positional arguments" in counts.last_reason
    finally:
        for_verl.uninstall()
    assert padding.unpad_input is home.unpad_input is original


@pytest.mark.peers
@pytest.mark.timeout(600)
def test_updates_of_verls_worker_are_the_same_and_call_ours(tmp_path: Path) -> None:
    """Log-probabilities of two micro-batches, then two updates of two micro-batches each."""
    pytest.importorskip("verl.workers.engine_workers", reason="verl is not installed")
    program, results = ROOT / "python_tests" / "helpers" / "_verl_worker_run.py", []
    for how in ("stock", "installed"):
        out = tmp_path / f"{how}.json"
        command = [sys.executable, str(program), how, str(out)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(json.loads(out.read_text()))
    stock, installed = results
    assert installed["logprobs"] == pytest.approx(stock["logprobs"], abs=4e-6)
    for want, got in zip(stock["updates"], installed["updates"], strict=True):
        assert got == pytest.approx(want, rel=1e-5, abs=1e-6)
    assert stock["calls"] == {}
    assert installed["calls"] == {"logprobs_from_logits": [6, 0], "unpad_input": [1, 0]}
