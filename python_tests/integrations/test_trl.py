"""The adapter for TRL: without TRL by a stand-in, and compared with the installed package."""

import argparse
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from skyrl_fast.integrations import trl as for_trl
from skyrl_fast.integrations.calls import Counts, Report, summary
from skyrl_fast.integrations.trl import switch
from skyrl_fast.integrations.trl.fused_head import OPTIONAL, FusedHead

CLOSE = {"rtol": 2e-6, "atol": 2e-6}  # exp and sums of another order
ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed() -> Iterator[Report]:
    pytest.importorskip("trl.trainer.utils", reason="TRL is not installed")
    yield for_trl.install()
    for_trl.uninstall()


@pytest.mark.spec("dropin.trl")
def test_loss_by_hand() -> None:
    logps, old = torch.tensor([[-1.0, -2.0]]).requires_grad_(), torch.tensor([[-1.0, -2.5]])
    mask, advantages = torch.ones(1, 2), torch.tensor([1.0])
    loss = for_trl.grpo_loss(logps, old, advantages, mask, loss_type="grpo").loss
    assert float(loss.detach()) == pytest.approx(-(1.0 + 1.2) / 2)  # exp(0.5) is clipped to 1.2
    loss.backward()
    assert logps.grad is not None and logps.grad[0, 1] == 0
    ref = torch.tensor([[-1.0 + 3, -2.0]])  # far from the policy: TRL's KL has no bound
    out = for_trl.grpo_loss(logps.detach().requires_grad_(), None, advantages, mask,
                            loss_type="grpo", beta=0.5, ref_per_token_logps=ref)  # fmt: skip
    kl = math.exp(3) - 3 - 1
    assert float(out.loss.detach()) == pytest.approx(-1.0 + 0.5 * kl / 2)
    assert float(out.metrics["kl"]) == pytest.approx(kl / 2)
    assert float(out.metrics["loss"]) == pytest.approx(float(out.loss.detach()))
    with pytest.raises(ValueError, match="loss_type"):
        for_trl.grpo_loss(logps, old, advantages, mask, loss_type="other")
    for loss_type in ("grpo", "cispo"):
        with pytest.raises(ValueError, match="importance_sampling_level"):
            level = "other" if loss_type == "grpo" else "sequence"
            options = {"loss_type": loss_type, "importance_sampling_level": level}
            for_trl.grpo_loss(logps, old, advantages, mask, **options)


def head_case(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(23, 16), torch.randn(301, 16)
    return hidden.to(dtype), weight.to(dtype), torch.randn(301).to(dtype), torch.arange(23) * 13


class Original:
    """In place of TRL's autograd function: only notes its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def apply(self, *arguments: Any) -> str:
        self.calls.append(arguments)
        return "TRL's"


@pytest.mark.spec("dropin.trl")
def test_what_the_head_does_not_compute_is_passed_on_and_counted() -> None:
    hidden, weight, bias, targets = head_case()
    original, counts = Original(), Counts()
    head = FusedHead(original, counts, on_gpu=False)
    got = head.apply(hidden, weight, bias, targets, 1.0, 32768, None, 1.0, ("log_probs",))
    assert got[1:] == (None,) * 4 and (counts.calls, counts.handed_back) == (1, 0)

    class Sharded(torch.Tensor):
        pass

    for reason, change in (
        ("float64 hidden", {0: hidden.double()}),
        ("the head is a Sharded", {1: weight.as_subclass(Sharded)}),
        ("tensors on meta", {0: hidden.to("meta")}),
        ("a logit scale of 0.0", {7: 0.0}),
        ("is_top1 with a soft cap", {6: 5.0, 8: ("is_top1",)}),
    ):
        arguments = [hidden, weight, bias, targets, 0.7, 32768, None, 1.0, OPTIONAL]
        for place, value in change.items():
            arguments[place] = value
        assert head.apply(*arguments) == "TRL's"
        assert original.calls.pop() == tuple(arguments)
        assert reason in counts.last_reason
    assert (counts.calls, counts.handed_back) == (6, 5)


@pytest.mark.spec("dropin.counted")
def test_line_about_calls() -> None:
    counts = {"f": Counts(5, 2, "why"), "g": Counts(1), "h": Counts()}
    assert summary("TRL 9", counts) == (
        "skyrl_fast in TRL 9: 4 calls: f 3, g 1; 2 by TRL itself: f 2 (why); never called: h"
    )
    assert summary("TRL 9", {}) == "skyrl_fast in TRL 9: no function is replaced"


@pytest.mark.peers
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("case", ["plain", "bias", "cap", "scale"])
def test_head_equals_trls(case: str, kind: str) -> None:
    kernels = pytest.importorskip("trl.kernels", reason="TRL is not installed")
    hidden, weight, bias, targets = head_case(
        torch.bfloat16 if kind == "bfloat16" else torch.float32
    )
    cap, scale = (5.0 if case == "cap" else None), (0.3 if case == "scale" else 1.0)
    outputs = tuple(x for x in OPTIONAL if case != "cap" or x != "is_top1")

    def run(function: Any) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        bias_leaf = leaves[2] if case == "bias" else None
        options = (targets, 0.7, 100, cap, scale, outputs)
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            out = function.apply(leaves[0], leaves[1], bias_leaf, *options)
        logprobs, entropy = out[:2]
        weights = torch.linspace(-1, 1, len(targets))
        ((logprobs * weights).sum() + 0.1 * (entropy * weights).sum()).backward()
        found = [x for x in out if x is not None]
        return [x.detach() for x in found] + [x.grad for x in leaves if x.grad is not None]

    counts = Counts()
    ours = run(FusedHead(kernels.ChunkedLogProbFunction, counts, on_gpu=False))
    expected = run(kernels.ChunkedLogProbFunction)
    assert counts.calls == 1 and counts.handed_back == 0 and len(ours) == len(expected)
    # Logits up to 20, of sums in another order; bfloat16 rounds them to 0.06.
    close = {"rtol": 1e-5, "atol": 1e-5} if kind == "float32" else {"rtol": 2e-2, "atol": 0.1}
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, **({} if a.dtype == torch.bool else close))


@pytest.mark.peers
def test_installing_and_restoring(installed: Report) -> None:
    import trl.trainer.utils as home

    assert installed.names("replaced") == ["ChunkedLogProbFunction", "selective_log_softmax"]
    assert home.selective_log_softmax is for_trl.selective_log_softmax
    head = home._ChunkedLogProbFunction
    for_trl.install()
    assert home._ChunkedLogProbFunction.original is head.original  # not a stand-in of a stand-in
    for_trl.uninstall()
    assert home._ChunkedLogProbFunction is head.original
    with pytest.raises(RuntimeError, match="nothing is installed"):
        for_trl.report()


@pytest.mark.peers
def test_another_source_is_kept_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl.trainer.utils", reason="TRL is not installed")
    monkeypatch.setattr(switch, "KNOWN_HEADS", {})
    with pytest.warns(for_trl.TrlFastWarning, match="is not replaced: its source, or that of"):
        report = for_trl.install()
    assert report.row("ChunkedLogProbFunction").state == "kept"
    for_trl.uninstall()


@pytest.mark.peers
def test_log_softmax(installed: Report) -> None:
    original: Any = switch._log_softmax
    torch.manual_seed(0)
    logits, index = torch.randn(3, 5, 200) * 3, torch.randint(0, 200, (3, 5))
    mask = torch.tensor([1, 0, 1, 1, 0]).expand(3, 5)
    for extras in ({}, {"temperature": 0.7}, {"row_mask": mask}):
        want = original(logits, index, **extras)
        got = for_trl.selective_log_softmax(logits, index, **extras)
        torch.testing.assert_close(got, want, rtol=0, atol=4e-6)
    counts = installed.row("selective_log_softmax").counts
    several = torch.randint(0, 200, (3, 5, 4))
    strided = torch.randn(3, 200, 5).transpose(1, 2)
    permuted = torch.randn(2, 3, 4, 200).permute(1, 0, 2, 3)[:, :, ::2]
    for reason, scores, ids in (
        ("several indices per row", logits, several),
        ("logits with strides", strided, index),
        ("logits with strides", permuted, torch.randint(0, 200, (3, 2, 2))),
        ("tensors on meta", logits.to("meta"), index.to("meta")),
    ):
        got, want = for_trl.selective_log_softmax(scores, ids), original(scores, ids)
        assert got.shape == want.shape and (got.is_meta or torch.equal(got, want))
        assert reason in counts.last_reason
    assert (counts.calls, counts.handed_back) == (7, 4)


LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo")


@pytest.mark.peers
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("sampler", [False, True])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_trainers_loss_and_metrics_equal_trls(loss_type: str, level: str, sampler: bool) -> None:
    module = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed")
    from skyrl_fast.integrations.trl.trainer import FastGRPOLoss

    if level == "sequence" and loss_type in ("sapo", "cispo", "vespo"):
        pytest.skip("per token only")
    torch.manual_seed(0)
    rows, width = 4, 9
    logps = -torch.rand(rows, width) * 2
    old, ref = (logps + 0.2 * torch.randn(rows, width) for _ in range(2))
    ref[0, :2] += torch.tensor([3.0, -15.0])  # far from the policy: TRL's KL has no bound
    mask = (torch.arange(width)[None] < torch.tensor([9, 3, 1, 6])[:, None]).long()
    inputs = {
        "prompt_ids": torch.ones(rows, 2).long(), "prompt_mask": torch.ones(rows, 2).long(),
        "completion_ids": torch.ones(rows, width).long(), "completion_mask": mask,
        "advantages": torch.randn(rows), "old_per_token_logps": old, "ref_per_token_logps": ref,
        "num_items_in_batch": torch.tensor(0),  # the least is 1, before it is scaled
        "importance_sampling_ratio": torch.rand(rows, width) + 0.5,
    }  # fmt: skip

    def run(compute: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, list[float]]]:
        current = logps.clone().requires_grad_()
        trainer = MagicMock()
        outputs = (current, torch.ones(rows, width), None)
        trainer._get_per_token_logps_and_entropies.return_value = outputs
        for name, value in dict(
            beta=0.1 if level == "token" else 0.0, epsilon_low=0.2, loss_type=loss_type,
            epsilon_high=1.2 if loss_type == "cispo" else 0.3, top_entropy_quantile=1.0,
            importance_sampling_level=level, off_policy_mask_threshold=None, use_vllm=sampler,
            vllm_importance_sampling_correction=True, current_gradient_accumulation_steps=2,
            max_completion_length=20, aux_loss_enabled=False, _entropy_bonus_enabled=False,
            _metrics=defaultdict(lambda: defaultdict(list)),
            get_gamma_weights=module.GRPOTrainer.get_gamma_weights,
        ).items():  # fmt: skip
            setattr(trainer, name, value)
        trainer.args = SimpleNamespace(
            delta=None, use_bias_correction_kl=False, sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05, steps_per_generation=4, vespo_k_pos=2.0,
            vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
        )  # fmt: skip
        trainer.accelerator.num_processes = 1
        trainer.accelerator.gather = lambda x: x
        trainer.accelerator.reduce = lambda x, reduction: x
        trainer.model.training = True
        loss = compute(trainer, None, inputs)
        loss.backward()
        assert current.grad is not None
        return loss.detach(), current.grad, dict(trainer._metrics["train"])

    if not sampler and loss_type == "vespo":
        del inputs["importance_sampling_ratio"]
    for_trl.switch.COUNTS[switch.GRPO_LOSS].handed_back = 0
    got, want = run(FastGRPOLoss._compute_loss), run(module.GRPOTrainer._compute_loss)
    assert for_trl.switch.COUNTS[switch.GRPO_LOSS].handed_back == 0
    torch.testing.assert_close(got[0], want[0], **CLOSE)
    torch.testing.assert_close(got[1], want[1], **CLOSE)
    assert got[2].keys() == want[2].keys()
    for name, values in want[2].items():
        assert got[2][name] == pytest.approx(values, abs=1e-6), name


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["grpo", "rloo", "dpo", "kto", "sft", "async_grpo"])
def test_real_trainers_call_the_replacement_and_learn_the_same(trainer: str) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    from bench import trl_trainers

    options = argparse.Namespace(
        vocab=700, hidden=64, layers=2, steps=2, rounds=1, response=16, bf16=False
    )
    found = {kind: runs[0] for kind, runs in trl_trainers.pairs(options, trainer).items()}
    stock, ours = found["stock"], found["installed"]
    assert len(stock["log"]) == len(ours["log"]) == 2
    for a, b in zip(stock["log"], ours["log"], strict=True):
        assert a == pytest.approx(b, abs=1e-6, rel=1e-6)
    assert "calls: ChunkedLogProbFunction" in ours["calls"]
    assert "by TRL itself" not in ours["calls"]


@pytest.mark.peers
@pytest.mark.slow
def test_real_trainer_with_the_loss_of_this_package() -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    from bench import trl_trainers

    options = argparse.Namespace(
        vocab=700, hidden=64, layers=2, steps=2, rounds=1, response=16, bf16=False
    )
    stock = trl_trainers.pairs(options, "grpo")["stock"][0]
    ours = trl_trainers.pairs(options, "grpo_loss")["installed"][0]
    for a, b in zip(stock["log"], ours["log"], strict=True):
        assert a == pytest.approx(b, abs=1e-6, rel=1e-5)
    assert "GRPOTrainer._compute_loss 2" in ours["calls"]


def test_line_is_printed_when_the_process_ends() -> None:
    program = (
        "from skyrl_fast.integrations.calls import Counts, print_at_exit, summary\n"
        "line = lambda: summary('TRL 9', {'f': Counts(3)})\n"
        "print_at_exit(line); print_at_exit(line)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == "skyrl_fast in TRL 9: 3 calls: f 3\n"
