"""The functions of the page on other trainers, with stand-ins of the hosts' modules and data."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.spec("dropin.other-trainers")

PAGE = Path(__file__).parents[2] / "docs/integrations/other_trainers.md"


@dataclass
class LossInputs:
    """Of prime-rl."""

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = None


@dataclass
class LossOutputs:
    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    made = ModuleType(name)
    vars(made).update(members)
    parts = name.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    monkeypatch.setitem(sys.modules, name, made)


def snippet(heading: str) -> dict[str, Any]:
    section = PAGE.read_text().split(f"\n## {heading}")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def clipped(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    ratio = (logprobs - old).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def test_prime_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    home = {"LossInputs": LossInputs, "LossOutputs": LossOutputs}
    module(monkeypatch, "prime_rl.trainer.rl.loss", **home)
    torch.manual_seed(0)
    logprobs = (-torch.rand(9)).requires_grad_()
    old, advantages = logprobs.detach() + 0.3 * torch.randn(9), torch.randn(9)
    mask, weights = torch.rand(9) < 0.7, torch.rand(9)
    out = snippet("prime-rl")["ppo_loss"](
        LossInputs(logprobs, old, None, advantages, mask, weights), clip_low=0.1
    )
    want = (clipped(logprobs, old, advantages, 0.1, 0.28) * weights)[mask].sum()
    torch.testing.assert_close(out.loss, want)
    (grad,) = torch.autograd.grad(out.loss, logprobs)
    torch.testing.assert_close(grad, torch.autograd.grad(want, logprobs)[0])
    assert out.metrics["clip_frac"].shape == ()


def test_slime() -> None:
    torch.manual_seed(0)
    totals, responses = [7, 5, 9], [3, 2, 6]
    tokens = [torch.randint(0, 20, (n,)) for n in totals]
    logits = torch.randn(1, sum(totals), 20).requires_grad_()
    masks = [torch.tensor([1, 0, 1]), torch.tensor([1, 1]), torch.tensor([1, 1, 1, 0, 0, 1])]
    old = [-torch.rand(n) * 3 for n in responses]
    advantages = [torch.randn(n) for n in responses]
    args = SimpleNamespace(rollout_temperature=0.8, eps_clip=0.2, eps_clip_high=0.3)
    batch = {
        "response_lengths": responses,
        "total_lengths": totals,
        "unconcat_tokens": tokens,
        "loss_masks": masks,
        "log_probs": old,
        "advantages": advantages,
    }
    got, metrics = snippet("slime and miles")["loss"](args, batch, logits, None)
    want, start = torch.zeros(()), 0
    for i, (total, response) in enumerate(zip(totals, responses, strict=True)):
        rows = (logits[0, start : start + total] / 0.8).log_softmax(-1)
        picked = rows[total - response - 1 : total - 1].gather(1, tokens[i][-response:, None])[:, 0]
        per_token = clipped(picked, old[i], advantages[i], 0.2, 0.3)
        want = want + (per_token * masks[i]).sum() / masks[i].sum()
        start += total
    torch.testing.assert_close(got, want)
    (grad,) = torch.autograd.grad(got, logits)
    torch.testing.assert_close(grad, torch.autograd.grad(want, logits)[0])
    assert float(metrics["loss"]) == float(got.detach())


def test_nemo_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    module(
        monkeypatch,
        "nemo_rl.algorithms.loss.interfaces",
        LossType=SimpleNamespace(TOKEN_LEVEL="token_level"),
        LossInputType=SimpleNamespace(LOGPROB="logprob"),
    )
    torch.manual_seed(0)
    logprobs = (-torch.rand(3, 5)).requires_grad_()
    data = {
        "token_mask": (torch.rand(3, 6) < 0.7).float(),
        "sample_mask": torch.tensor([1.0, 0.0, 1.0]),
        "prev_logprobs": -torch.rand(3, 6),
        "advantages": torch.randn(3, 6),
    }
    loss, _ = snippet("NeMo-RL")["FastPolicyLoss"]()(
        data, torch.tensor(7), torch.tensor(40), logprobs
    )
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    terms = clipped(logprobs, data["prev_logprobs"][:, 1:], data["advantages"][:, 1:], 0.2, 0.28)
    want = (terms * mask).sum() / 40
    torch.testing.assert_close(loss, want)
    (grad,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(grad, torch.autograd.grad(want, logprobs)[0])
