"""Sizes and all cases of a run, by the names of their groups.

A group's data are created on demand, only if the group is selected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from bench._agents import SHAPES
from bench.gpu import batch_cases, linear_cases, logit_cases
from bench.gpu.case import Case
from bench.gpu.linear_cases import Head
from bench.gpu.logit_cases import Logits
from bench.gpu.step_cases import step_cases
from bench.gpu.tree_cases import tree_cases


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of one run: tokens and vocabularies of logits, the head's width, batches to pack."""

    tokens: int
    vocabs: tuple[int, ...]
    hidden: int
    batch: batch_cases.BatchShape
    lengths: tuple[int, ...]  # tokens of the plot over tokens, and of the test of many lengths
    is_measured: bool  # the model that trains is large, each case is timed often
    tree_shapes: tuple[str, ...] = tuple(SHAPES)
    tree_divisor: int = 1  # divides the lengths of prefix trees


FULL = Size(8192, (32_000, 128_256, 151_936, 262_144), 4096, (17_006, 3500, 500),
            (512, 1024, 2048, 4096, 6144, 8192, 12_288, 16_384), True)  # fmt: skip
TINY = Size(6, (50, 64), 8, (5, 7, 4), (2, 6), False,
            tree_divisor=100)  # fmt: skip


Work = TypeVar("Work")


def wanted(works: dict[str, Work], of: str, only: str) -> dict[str, Work]:
    """Return the workloads by group name, of groups whose name contains `only`."""
    groups = {f"{work} {of}": cases for work, cases in works.items()}
    return {group: cases for group, cases in groups.items() if only in group}


LOGIT_WORKS = {
    "logprob forward": logit_cases.forward_cases,
    "logprob forward + backward": logit_cases.backward_cases,
    "logprob 30 % trained": logit_cases.trained_cases,
    "masked_logprob_loss": logit_cases.loss_cases,
}
OVER_TOKENS = {"over tokens: logprob forward + backward": logit_cases.backward_cases}
LINEAR_WORKS = {
    "linear_logprob": linear_cases.whole_cases,
    "linear_logprob 30 % trained": linear_cases.trained_cases,
    "linear_logprob forward": linear_cases.forward_cases,
}
BATCH_WORKS: dict[str, batch_cases.Cases] = {
    "pack": batch_cases.packing_cases,
    "group_advantage": batch_cases.advantage_cases,
    "policy_loss PPO": batch_cases.PPO,
    "policy_loss PPO + k3": batch_cases.PPO_K3,
}


def of_logits(size: Size, device: str, dtype: torch.dtype, only: str) -> Iterator[Case]:
    """Yield the cases on logits; only one size is in memory at a time."""
    plans = [(size.tokens, vocab, LOGIT_WORKS) for vocab in size.vocabs]
    plans += [(tokens, size.vocabs[-2], OVER_TOKENS) for tokens in size.lengths]
    for tokens, vocab, works in plans:
        groups = wanted(works, f"{tokens} x {vocab} {dtype}", only)
        if groups:
            logits = Logits.random(tokens, vocab, device, dtype)
            for group, cases in groups.items():
                yield from cases(logits, group)
            del logits


def of_hidden(size: Size, device: str, dtype: torch.dtype, only: str) -> Iterator[Case]:
    """Yield the cases on hidden states."""
    sizes = (size.tokens, size.hidden, size.vocabs[-2])
    groups = wanted(LINEAR_WORKS, " x ".join(map(str, sizes)) + f" {dtype}", only)
    if groups:
        head = Head.random(*sizes, device, dtype)
        for group, cases in groups.items():
            yield from cases(head, group)


def of_batches(size: Size, device: str, only: str) -> Iterator[Case]:
    """Yield the cases on a batch's rows."""
    rows, prompt, response = size.batch
    groups = wanted(BATCH_WORKS, f"{rows} x ({prompt} + {response})", only)
    for group, cases in groups.items():
        yield from cases(size.batch, device, group)


def all_cases(size: Size, device: str, dtype: torch.dtype, only: str = "") -> Iterator[Case]:
    """Yield every case of a run whose group name contains `only`."""
    yield from of_logits(size, device, dtype, only)
    yield from of_hidden(size, device, dtype, only)
    yield from of_batches(size, device, only)
    yield from step_cases(device, large=size.is_measured, only=only)
    yield from tree_cases(
        device,
        large=size.is_measured,
        only=only,
        shapes=size.tree_shapes,
        divisor=size.tree_divisor,
    )
