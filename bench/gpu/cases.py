"""The work that is timed: sizes, and all cases of a run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu import peers
from bench.gpu.case import OURS, Case, within
from bench.gpu.logit_cases import (
    CHECKED_TOKENS,
    TRAINED_SHARE,
    Logits,
    backward_cases,
    forward_cases,
    loss_cases,
    trained_cases,
)
from bench.gpu.tree_cases import tree_cases
from skyrl_fast import (
    convert_prompts_responses_to_batch_tensors,
    group_advantage,
    linear_logprob,
    policy_loss,
)
from skyrl_fast.ops.reference.policy_loss import METRICS

ADVANTAGE_TOLERANCE = 1e-4  # sums of a row's float32 rewards in another order
LINEAR_TOLERANCE = 0.03  # of norms, for peers that compute in bfloat16
LOSS_TOLERANCE = 1e-5  # float32 sums of 10^7 terms


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of one run: tokens and vocabularies of logits, the head's width, batches to pack."""

    tokens: int
    vocabs: tuple[int, ...]
    hidden: int
    batch: tuple[int, int, int]  # rows, longest prompt, longest response
    lengths: tuple[int, ...]  # tokens of the plot over tokens, and of the test of many lengths
    large_model: bool  # that trains on prefix trees


FULL = Size(8192, (32_000, 128_256, 151_936, 262_144), 4096, (17_006, 3500, 500),
            (512, 1024, 2048, 4096, 6144, 8192, 12_288, 16_384), True)  # fmt: skip
TINY = Size(6, (50, 64), 8, (5, 7, 4), (2, 6), False)


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
    """Hidden states to the sum of negative log-probabilities: of all tokens, and of part of them.

    Rates count three products forward and backward (one forward) of the trained rows, whatever a
    contender computes.
    """
    g = torch.Generator(device=device).manual_seed(2)
    hidden = torch.randn(size.tokens, size.hidden, generator=g, device=device, dtype=dtype)
    weight = torch.randn(vocab, size.hidden, generator=g, device=device, dtype=dtype)
    weight *= size.hidden**-0.5
    targets = torch.randint(0, vocab, (size.tokens,), generator=g, device=device)
    mask = torch.rand(size.tokens, generator=g, device=device) < TRAINED_SHARE

    def backward(function: peers.LinearFunction, count: int | None = None) -> list[torch.Tensor]:
        h, w = hidden[:count].detach().requires_grad_(), weight.detach().requires_grad_()
        function(h, w, targets[:count]).backward()
        assert h.grad is not None and w.grad is not None
        return [h.grad, w.grad]

    def forward(function: peers.LinearFunction) -> None:
        with torch.no_grad():
            function(hidden, weight, targets)

    def exact_gradients(count: int, mask: torch.Tensor) -> list[torch.Tensor]:
        h, w = hidden[:count].double().requires_grad_(), weight.double().requires_grad_()
        logprob = (h @ w.T).log_softmax(1).gather(1, targets[:count, None]).squeeze(1)
        return list(torch.autograd.grad(-(logprob * mask[:count]).sum(), (h, w)))

    def error(function: peers.LinearFunction, exact: list[torch.Tensor]) -> float:
        pairs = zip(backward(function, CHECKED_TOKENS), exact, strict=True)
        return within(
            max(float((a.double() - b).norm() / b.norm()) for a, b in pairs), LINEAR_TOLERANCE
        )

    def ours(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return -linear_logprob(h, w, t).sum()

    def ours_masked(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return -linear_logprob(h, w, t, mask=mask[: len(h)]).sum()

    def gathered(function: peers.LinearFunction) -> peers.LinearFunction:
        def loss(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            rows = mask[: len(h)].nonzero().squeeze(1)
            return function(h[rows], w, t[rows])

        return loss

    what = f"{size.tokens} x {size.hidden} x {vocab} {dtype}"
    flops = 2.0 * size.tokens * vocab * size.hidden
    whole = {OURS: ours} | peers.LINEAR
    part = {OURS: ours_masked} | {f"{n} + gather": gathered(f) for n, f in peers.LINEAR.items()}
    everything = torch.ones_like(mask)
    for group, contenders, trained, share in (
        ("linear_logprob", whole, everything, 1.0),
        ("linear_logprob 30 % trained", part, mask, TRAINED_SHARE),
    ):
        exact = exact_gradients(CHECKED_TOKENS, trained)
        for name, function in contenders.items():
            call = functools.partial(backward, function)
            check = functools.partial(error, function, exact)
            facts = {"flops": 3 * flops * share}
            yield Case(f"{group} {what}", name, call, 0.0, check=check, facts=facts)
        del exact
    for name, function in whole.items():
        call = functools.partial(forward, function)
        yield Case(f"linear_logprob forward {what}", name, call, 0.0, facts={"flops": flops})


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

    def there() -> list[torch.Tensor]:
        batch = convert_prompts_responses_to_batch_tensors(*arguments, device=device)
        return [tensor for tensor in batch if tensor is not None]

    def here_then_there() -> list[torch.Tensor]:
        batch = convert_prompts_responses_to_batch_tensors(*arguments)
        return [tensor.to(device) for tensor in batch if tensor is not None]

    def unequal() -> float:
        pairs = zip(there(), here_then_there(), strict=True)
        return within(float(sum(int((a != b).sum()) for a, b in pairs)), 0.0)

    for name, call in ((OURS, there), ("padded on the CPU, then sent", here_then_there)):
        yield Case(group, name, call, padded + sent, check=unequal, bus_bytes=sent)

    rewards = torch.randn(num_rows, int(responses.max()), device=device)
    mask = torch.ones_like(rewards)
    ids = torch.arange(num_rows, device=device) // 8
    group = f"group_advantage {tuple(rewards.shape)}"
    floor = 3.0 * rewards.nbytes
    advantage = functools.partial(group_advantage, rewards, ids, response_mask=mask)

    def difference() -> float:
        native, plain = (advantage(backend=backend)[0] for backend in ("native", "torch"))
        return within(float((native - plain).abs().max()), ADVANTAGE_TOLERANCE)

    for name, backend in ((OURS, "native"), ("the same in torch", "torch")):
        call = functools.partial(advantage, backend=backend)
        yield Case(group, name, call, floor, check=difference)


LOGIT_WORKS: dict[str, Callable[[Logits, str], Iterator[Case]]] = {
    "logprob forward": forward_cases,
    "logprob forward + backward": backward_cases,
    "logprob 30 % trained": trained_cases,
    "masked_logprob_loss": loss_cases,
}


def logit_cases(size: Size, device: str, dtype: torch.dtype, only: str) -> Iterator[Case]:
    """Everything that begins with logits; only one size of them is in memory at a time."""
    over_tokens = {"over tokens: logprob forward + backward": backward_cases}
    plans = [(size.tokens, vocab, LOGIT_WORKS) for vocab in size.vocabs]
    plans += [(tokens, size.vocabs[-2], over_tokens) for tokens in size.lengths]
    for tokens, vocab, works in plans:
        groups = {f"{work} {tokens} x {vocab} {dtype}": cases for work, cases in works.items()}
        groups = {group: cases for group, cases in groups.items() if only in group}
        if groups:
            x = Logits.random(tokens, vocab, device, dtype)
            for group, cases in groups.items():
                yield from cases(x, group)
            del x


def all_cases(size: Size, device: str, dtype: torch.dtype, only: str = "") -> Iterator[Case]:
    """Every case of a run whose group's name holds `only`."""
    yield from logit_cases(size, device, dtype, only)
    others = (
        *(linear_cases(size, size.vocabs[-2], device, dtype), packing_cases(size, device)),
        policy_loss_cases(size, device),
    )
    for cases in others:
        yield from (case for case in cases if only in case.group)
    yield from tree_cases(device, large=size.large_model, only=only)
