"""The work that is timed. Each case names its group, its contenders and the bytes of its floor.

Floors, with L the bytes of the logits: forward L; forward and backward L read twice and written
once, or read once and written once where the loss is known in the same visit; of rows not trained
only their gradient's zeros are written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.gpu import peers
from skyrl_fast import (
    convert_prompts_responses_to_batch_tensors,
    group_advantage,
    linear_logprob,
    masked_logprob_loss,
    policy_loss,
    selected_logprob,
)
from skyrl_fast.ops.reference.policy_loss import METRICS

OURS = "skyrl_fast"
TRAINED_SHARE = 0.3
LOGPROB_TOLERANCE = 0.07  # of peers that compute in bfloat16
LOSS_TOLERANCE = 1e-5  # float32 sums of 10^7 terms


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of one run: tokens and vocabularies of logits, the head's width, batches to pack."""

    tokens: int
    vocabs: tuple[int, ...]
    hidden: int
    batch: tuple[int, int, int]  # rows, longest prompt, longest response
    lengths: tuple[int, ...]  # tokens of the plot over tokens, and of the test of many lengths


FULL = Size(8192, (32_000, 128_256, 151_936, 262_144), 4096, (17_006, 3500, 500),
            (512, 1024, 2048, 4096, 6144, 8192, 12_288, 16_384))  # fmt: skip
TINY = Size(6, (50, 64), 8, (5, 7, 4), (2, 6))


@dataclass(slots=True)
class Case:
    """One row of a table: a contender's call, and what comes before it untimed."""

    group: str
    contender: str
    call: Callable[[], object]
    floor_bytes: float
    prepare: Callable[[], object] = lambda: None
    check: Callable[[], float] | None = None  # the answer's error, before anything is timed
    facts: dict[str, Any] = field(default_factory=dict)


class Logits:
    """Logits that every contender finds fresh, and what goes with them."""

    def __init__(self, tokens: int, vocab: int, device: str, dtype: torch.dtype) -> None:
        g = torch.Generator(device=device).manual_seed(1)
        self.master = torch.randn(tokens, vocab, generator=g, device=device, dtype=dtype) * 3
        self.work = torch.empty_like(self.master)
        self.targets = torch.randint(0, vocab, (tokens,), generator=g, device=device)
        self.mask = torch.rand(tokens, generator=g, device=device) < TRAINED_SHARE
        self.trained = self.mask.nonzero().squeeze(1)
        self.anchor = selected_logprob(self.master, self.targets, backend="torch").float()
        self.anchor += torch.randn(tokens, generator=g, device=device) * 0.1
        self.advantages = torch.randn(tokens, generator=g, device=device)
        self.weights = torch.full((tokens,), 1.0 / tokens, device=device)

    @property
    def num_bytes(self) -> int:
        """L."""
        return self.master.nbytes

    def refill(self) -> None:
        """Put the logits back where a gradient was written over them."""
        self.work.copy_(self.master)

    def leaf(self) -> torch.Tensor:
        """Return the logits, to be differentiated, without a copy."""
        return self.work.detach().requires_grad_()


def logprob_error(function: peers.Function, x: Logits) -> float:
    """Return the largest error of log-probabilities against float64."""
    rows = slice(0, 64)
    with torch.no_grad():
        got = function(x.master[rows], x.targets[rows]).double()
    exact = x.master[rows].double().log_softmax(1).gather(1, x.targets[rows, None]).squeeze(1)
    return within(float((got - exact).abs().max()), LOGPROB_TOLERANCE)


def within(error: float, tolerance: float) -> float:
    """Return the error; refuse one that is too large, and NaN."""
    if not error <= tolerance:
        raise ValueError(f"wrong by {error:.3g}")
    return error


def forward_cases(x: Logits, group: str) -> Iterator[Case]:
    """Log-probabilities without a gradient."""

    def run(function: peers.Function) -> None:
        with torch.no_grad():
            function(x.master, x.targets)

    ours = {
        OURS: selected_logprob,
        f"{OURS} + entropy": lambda a, t: selected_logprob(a, t, return_entropy=True)[0],
        f"{OURS} Triton": lambda a, t: selected_logprob(a, t, backend="triton"),
    }
    for name, function in (ours | peers.LOGPROB).items():
        call = functools.partial(run, function)
        yield Case(
            group, name, call, x.num_bytes, check=functools.partial(logprob_error, function, x)
        )


def backward_cases(x: Logits, group: str) -> Iterator[Case]:
    """Forward and backward; gradients in place where the contender can."""

    def run(function: peers.Function) -> None:
        (function(x.leaf(), x.targets) * x.weights).sum().backward()

    ours = {
        OURS: functools.partial(selected_logprob, inplace_backward=True),
        f"{OURS} Triton": functools.partial(
            selected_logprob, inplace_backward=True, backend="triton"
        ),
    }
    for name, function in (ours | peers.LOGPROB).items():
        yield Case(group, name, functools.partial(run, function), 3 * x.num_bytes, x.refill)


def trained_cases(x: Logits, group: str) -> Iterator[Case]:
    """The same with part of the rows trained; every peer also with a gather of those rows."""
    floor = (2 * TRAINED_SHARE + 1) * x.num_bytes

    def ours() -> None:
        logprob = selected_logprob(x.leaf(), x.targets, mask=x.mask, inplace_backward=True)
        (logprob * x.weights).sum().backward()

    def whole(function: peers.Function) -> None:
        (function(x.leaf(), x.targets) * x.weights * x.mask).sum().backward()

    def gathered(function: peers.Function) -> None:
        rows = x.leaf()[x.trained]
        (function(rows, x.targets[x.trained]) * x.weights[x.trained]).sum().backward()

    yield Case(group, OURS, ours, floor, x.refill)
    for name, function in peers.LOGPROB.items():
        yield Case(group, name, functools.partial(whole, function), floor, x.refill)
        call = functools.partial(gathered, function)
        yield Case(group, f"{name} + gather", call, floor, x.refill)


def loss_cases(x: Logits, group: str) -> Iterator[Case]:
    """Logits to PPO's loss and its gradient."""
    cells = {
        "anchor_logprobs": x.anchor,
        "advantages": x.advantages,
        "loss_mask": x.mask,
        "loss_weights": x.weights,
    }

    def ours(backend: str | None) -> None:
        out = masked_logprob_loss(x.leaf(), x.targets, **cells, inplace=True, backend=backend)
        out.loss.backward()

    def two_visits() -> None:
        logprob = selected_logprob(x.leaf(), x.targets, mask=x.mask, inplace_backward=True)
        ratio = (logprob - x.anchor).exp()
        clipped = ratio.clamp(0.8, 1.2)
        tokens = torch.maximum(-x.advantages * ratio, -x.advantages * clipped)
        (tokens * x.weights * x.mask).sum().backward()

    def liger() -> None:
        peers.liger_grpo(x.leaf(), x.targets, cells).backward()

    floor = (TRAINED_SHARE + 1) * x.num_bytes
    yield Case(group, OURS, functools.partial(ours, None), floor, x.refill)
    yield Case(group, f"{OURS} Triton", functools.partial(ours, "triton"), floor, x.refill)
    yield Case(group, f"{OURS} in two visits", two_visits, floor, x.refill)
    yield Case(group, "Liger GRPO", liger, floor, x.refill)


def policy_loss_cases(size: Size, device: str) -> Iterator[Case]:
    """Log-probabilities to PPO's loss and gradient; each row trains the cells at its right end.

    Floors: the mask read and the gradient written on all cells, the inputs read on trained ones.
    """
    num_rows, _, width = size.batch
    g = torch.Generator(device=device).manual_seed(4)
    lengths = torch.randint(1, width + 1, (num_rows, 1), generator=g, device=device)

    def near(x: torch.Tensor | float) -> torch.Tensor:
        return x + torch.randn(num_rows, width, generator=g, device=device) * 0.1

    logprobs = -near(1.0).abs()
    mask = (torch.arange(width, device=device) >= width - lengths).float()
    advantages = torch.randn(num_rows, 1, generator=g, device=device) * mask
    d = {"old": near(logprobs), "reference": near(logprobs), "mask": mask, "advantages": advantages}
    d["scaled"] = advantages / mask.sum()
    d["weights"] = torch.ones(num_rows, device=device) / mask.sum()
    trained = float(mask.sum())

    def ours(x: torch.Tensor, d: peers.Cells, **options: Any) -> torch.Tensor:
        weights = d["weights"]
        loss, metrics = policy_loss(
            x, d["old"], d["advantages"], d["mask"], row_weights=weights, **options
        )
        assert len(metrics) == len(METRICS)  # which the others do not make, or in part
        return loss

    def run(function: peers.LossFunction) -> torch.Tensor:
        leaf = logprobs.detach().requires_grad_()
        function(leaf, d).backward()
        assert leaf.grad is not None
        return leaf.grad

    k3 = {"ref_logprobs": d["reference"], "kl_estimator": "k3", "kl_coef": peers.KL_COEF}
    for name, options, others in (("PPO", {}, peers.PPO), ("PPO + k3", k3, peers.PPO_K3)):
        inputs = 3 + len(options) // 3
        floor = 8.0 * mask.numel() + 4 * inputs * trained
        group = f"policy_loss {name} {num_rows} x {width} float32"
        exact = run(functools.partial(ours, backend="torch", **options)) * trained

        def error(function: peers.LossFunction, exact: torch.Tensor = exact) -> float:
            return within(float((run(function) * trained - exact).abs().max()), LOSS_TOLERANCE)

        contenders = {
            OURS: functools.partial(ours, **options),
            f"{OURS} Triton": functools.partial(ours, backend="triton", **options),
            "the same in torch": functools.partial(ours, backend="torch", **options),
        }
        for contender, function in (contenders | others).items():
            check = functools.partial(error, function)
            yield Case(group, contender, functools.partial(run, function), floor, check=check)


def linear_cases(size: Size, vocab: int, device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Hidden states to log-probabilities, forward and backward."""
    g = torch.Generator(device=device).manual_seed(2)
    hidden = torch.randn(size.tokens, size.hidden, generator=g, device=device, dtype=dtype)
    weight = torch.randn(vocab, size.hidden, generator=g, device=device, dtype=dtype)
    weight *= size.hidden**-0.5
    targets = torch.randint(0, vocab, (size.tokens,), generator=g, device=device)
    mask = torch.rand(size.tokens, generator=g, device=device) < TRAINED_SHARE
    flops = 2.0 * size.tokens * vocab * size.hidden

    def run(function: Callable[..., torch.Tensor]) -> None:
        h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        function(h, w, targets).backward()

    ours = {
        OURS: lambda h, w, t: -linear_logprob(h, w, t).sum(),
        f"{OURS} 30 % trained": lambda h, w, t: -linear_logprob(h, w, t, mask=mask).sum(),
    }
    group = f"linear_logprob {size.tokens} x {size.hidden} x {vocab} {dtype}"
    for name, function in (ours | peers.LINEAR).items():
        share = TRAINED_SHARE if "trained" in name else 1.0
        facts = {"flops": 3 * flops * share}
        yield Case(group, name, functools.partial(run, function), 0.0, facts=facts)


def packing_cases(size: Size, device: str) -> Iterator[Case]:
    """Rows to the padded batch on the device, and advantages there."""
    num_rows, prompt, response = size.batch
    g = torch.Generator().manual_seed(3)
    prompts = torch.randint(1, prompt + 1, (num_rows,), generator=g)
    responses = torch.randint(1, response + 1, (num_rows,), generator=g)

    def flat(lengths: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        values = torch.randint(0, 9, (int(cu[-1]),), generator=g).to(dtype)
        return values, cu.to(torch.int32)

    rows = (flat(prompts, torch.int32), flat(responses, torch.int32))
    floats = flat(responses, torch.float32)
    arguments = (0, *rows, floats, floats, floats)
    tokens, trained = int((prompts + responses).sum()), int(responses.sum())
    padded = num_rows * (2 * 8 * int((prompts + responses).max()) + 20 * int(responses.max()))
    sent = 4 * tokens + 12 * trained
    group = f"pack {num_rows} rows to the device"

    def there() -> None:
        convert_prompts_responses_to_batch_tensors(*arguments, device=device)

    def here_then_there() -> None:
        batch = convert_prompts_responses_to_batch_tensors(*arguments)
        for tensor in batch:
            if tensor is not None:
                tensor.to(device)

    facts = {"bytes over the bus": sent}
    yield Case(group, OURS, there, padded + sent, facts=facts)
    yield Case(group, "padded on the CPU, then sent", here_then_there, padded + sent)

    rewards = torch.randn(num_rows, int(responses.max()), device=device)
    mask = torch.ones_like(rewards)
    ids = torch.arange(num_rows, device=device) // 8
    group = f"group_advantage {tuple(rewards.shape)}"
    floor = 3.0 * rewards.nbytes
    for name, backend in ((OURS, "native"), ("the same in torch", "torch")):
        call = functools.partial(group_advantage, rewards, ids, response_mask=mask, backend=backend)
        yield Case(group, name, call, floor)


def all_cases(size: Size, device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Every case of a run; logits of one vocabulary at a time."""
    for vocab in size.vocabs:
        x = Logits(size.tokens, vocab, device, dtype)
        what = f"{size.tokens} x {vocab} {dtype}"
        yield from forward_cases(x, f"logprob forward {what}")
        yield from backward_cases(x, f"logprob forward + backward {what}")
        yield from trained_cases(x, f"logprob 30 % trained {what}")
        yield from loss_cases(x, f"masked_logprob_loss {what}")
        del x
    for tokens in size.lengths:
        x = Logits(tokens, size.vocabs[-2], device, dtype)
        what = f"{tokens} x {size.vocabs[-2]} {dtype}"
        yield from backward_cases(x, f"over tokens: logprob forward + backward {what}")
        del x
    yield from linear_cases(size, size.vocabs[-2], device, dtype)
    yield from packing_cases(size, device)
    yield from policy_loss_cases(size, device)
