"""
Kernels of skyrl_fast. Private: use the functions of skyrl_fast and skyrl_fast.ops.
"""

from __future__ import annotations

import collections.abc
import typing

__all__: list[str] = [
    "PageBlock",
    "PassPlan",
    "PrefixTree",
    "Rows",
    "TreeTiles",
    "balanced_parts",
    "cells_per_sum",
    "check_kept_sets",
    "compiler",
    "copy_cells",
    "copy_segments",
    "count_nonzeros",
    "cuda_archs",
    "cuda_versions",
    "delta_sums",
    "delta_sums_cuda",
    "dense_ids",
    "divide_rows",
    "fill_around",
    "fill_rows",
    "flags",
    "flat_to_padded",
    "flat_to_padded_cuda",
    "gathered_logprob",
    "gathered_logprob_backward",
    "gigpo_advantage",
    "group_advantage",
    "group_advantage_cuda",
    "join_lists",
    "kl_penalty",
    "kl_penalty_cuda",
    "mask_blocks",
    "mask_counts",
    "masked_logprob_loss",
    "masked_logprob_loss_cuda",
    "merge_plan_flat",
    "merge_plan_rows",
    "merge_routes",
    "multiply_rows",
    "num_loss_sums",
    "off_policy_correction",
    "padded_to_flat",
    "padded_to_flat_cuda",
    "page_pool_idle_bytes",
    "page_pool_limit",
    "plan_visit",
    "policy_loss",
    "policy_loss_cuda",
    "scale_cells_cuda",
    "scale_rows_cuda",
    "selected_logprob",
    "selected_logprob_backward",
    "selected_logprob_backward_cuda",
    "selected_logprob_cuda",
    "set_page_pool_limit",
    "set_simd_level",
    "simd_level",
    "sum_rows",
    "token_chain",
    "turn_group_advantage",
    "turn_level_returns",
    "visit_code_major",
]

class Rows:
    @typing.overload
    def __init__(self, op: str, name: str, rows: typing.Any) -> None: ...
    @typing.overload
    def __init__(self, op: str, name: str, flat: typing.Any, offsets: typing.Any) -> None: ...
    def lengths(self, out: typing.Any) -> None: ...
    @property
    def kind(self) -> typing.Any: ...
    @property
    def num_rows(self) -> int: ...

class PageBlock:
    def __init__(self, num_bytes: int) -> None: ...

class PassPlan:
    @typing.overload
    def __init__(
        self,
        tokens: typing.Any,
        trained: typing.Any,
        rows: tuple,
        visited: typing.Any,
        routes: tuple | None,
        token_budget: int,
        keep_trajectories: bool,
        tree: bool,
        costs: collections.abc.Sequence[float] | None,
        length_limits: collections.abc.Sequence[int],
        longest_row: int,
        num_threads: int,
    ) -> None: ...
    @typing.overload
    def __init__(
        self,
        tokens: typing.Any,
        trained: typing.Any,
        cu_tokens: typing.Any,
        cu_responses: typing.Any,
        num_rows: int,
        routes: tuple | None,
        layouts: collections.abc.Sequence[tuple[bool, typing.Any]],
        num_threads: int,
    ) -> None: ...
    def num_kept_tokens(self, number: int, kept: tuple) -> int: ...
    def write(
        self, number: int, tokens: typing.Any, routes: typing.Any, kept: tuple | None, out: dict
    ) -> int: ...
    def write_layout(self, number: int, out: typing.Any) -> None: ...
    def write_sizes(self, out: typing.Any) -> None: ...
    @property
    def num_passes(self) -> int: ...

class PrefixTree:
    def __init__(
        self, tokens: typing.Any, rows: tuple, labels: typing.Any, num_threads: int
    ) -> None: ...
    def write(
        self,
        nodes: tuple,
        group_starts: typing.Any,
        row_nodes: typing.Any,
        row_node_starts: typing.Any,
        num_threads: int,
    ) -> None: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...

class TreeTiles:
    def __init__(
        self, parents: typing.Any, ends: typing.Any, window: int = 0, chunk: int = 0
    ) -> None: ...
    def backward(
        self,
        saved: tuple,
        grad: typing.Any,
        scale: float,
        softcap: float,
        grads: tuple,
        num_threads: int,
    ) -> None: ...
    def forward(
        self,
        query: typing.Any,
        key: typing.Any,
        value: typing.Any,
        scale: float,
        softcap: float,
        sinks: typing.Any,
        out: typing.Any,
        lse: typing.Any,
        num_threads: int,
    ) -> None: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def num_tiles(self) -> int: ...

def balanced_parts(loads: typing.Any, budget: int, multiple: int, out: typing.Any) -> int: ...
def check_kept_sets(
    op: str,
    target_ids: typing.Any,
    mask: typing.Any,
    kept_ids: typing.Any,
    kept_ranges: typing.Any,
    vocab: int,
) -> None: ...
def copy_cells(cells: typing.Any, out: typing.Any, num_threads: int) -> None: ...
def copy_segments(
    op: str,
    source: typing.Any,
    source_starts: typing.Any,
    target: typing.Any,
    target_starts: typing.Any,
    lengths: typing.Any,
    num_threads: int,
) -> None: ...
def count_nonzeros(
    cells: typing.Any, ids: typing.Any, nonzeros: typing.Any, lasts: typing.Any, num_threads: int
) -> int: ...
def cuda_versions() -> tuple[int, int]:
    """
    Return CUDA's version of the runtime inside, and the newest of the driver: 13000, 12080.
    """

def delta_sums(
    a: typing.Any,
    b: typing.Any,
    mask: typing.Any,
    cu_seqlens: typing.Any,
    sums: typing.Any,
    num_threads: int,
) -> None: ...
def delta_sums_cuda(
    a: typing.Any,
    b: typing.Any,
    mask: typing.Any,
    cu_seqlens: typing.Any,
    sums: typing.Any,
    stream: int,
) -> None: ...
def dense_ids(
    labels: typing.Any, out: typing.Any, op: str = "group_advantage", name: str = "group_ids"
) -> None: ...
def divide_rows(
    cells: typing.Any, divisors: typing.Any, out: typing.Any, num_threads: int
) -> None: ...
def fill_around(
    out: typing.Any, starts: typing.Any, lengths: typing.Any, cell: typing.Any, num_threads: int
) -> None: ...
def fill_rows(op: str, copies: list, fills: list, num_threads: int) -> None: ...
def flags(values: typing.Any, out: typing.Any, name: str, op: str = "group_advantage") -> None: ...
def flat_to_padded(
    flat: typing.Any,
    cu_seqlens: typing.Any,
    starts: typing.Any,
    pattern: bytes,
    padded: typing.Any,
    num_threads: int,
) -> None: ...
def flat_to_padded_cuda(
    flat: typing.Any,
    cu_seqlens: typing.Any,
    starts: typing.Any,
    pattern: bytes,
    padded: typing.Any,
    stream: int,
) -> None: ...
def gathered_logprob(
    logits: typing.Any,
    target_ids: typing.Any,
    mask: typing.Any,
    temperature: float,
    logprobs: typing.Any,
    lse: typing.Any,
    num_threads: int,
) -> None: ...
def gathered_logprob_backward(
    logits: typing.Any,
    target_ids: typing.Any,
    mask: typing.Any,
    temperature: float,
    lse: typing.Any,
    grad_logprobs: typing.Any,
    grad: typing.Any,
    num_threads: int,
) -> None: ...
def gigpo_advantage(
    rewards: typing.Any,
    group_ids: typing.Any,
    anchor_ids: typing.Any,
    is_last_step: typing.Any,
    mask: typing.Any,
    cu_seqlens: typing.Any,
    rewards_are_ragged: bool,
    gamma: float,
    step_weight: float,
    scale_by_std: bool,
    out: typing.Any,
    num_threads: int,
) -> None: ...
def group_advantage(
    rewards: typing.Any,
    group_ids: typing.Any,
    is_last_step: typing.Any,
    mask: typing.Any,
    cu_seqlens: typing.Any,
    rewards_are_ragged: bool,
    estimator: int,
    out: typing.Any,
    num_threads: int,
) -> None: ...
def group_advantage_cuda(
    rewards: typing.Any,
    ids: typing.Any,
    order: typing.Any,
    last: typing.Any,
    mask: typing.Any,
    cu_seqlens: typing.Any,
    rewards_are_ragged: bool,
    estimator: int,
    scores: typing.Any,
    work: typing.Any,
    out: typing.Any,
    stream: int,
) -> None: ...
def join_lists(
    op: str, field: str, rows: list, pieces: tuple, lengths: typing.Any, filler: typing.Any
) -> list: ...
def kl_penalty(
    logprobs: typing.Any,
    ref_logprobs: typing.Any,
    mask: typing.Any,
    kl: int,
    grad_out: typing.Any,
    out: typing.Any,
    num_threads: int,
) -> None: ...
def kl_penalty_cuda(
    logprobs: typing.Any,
    ref_logprobs: typing.Any,
    mask: typing.Any,
    kl: int,
    grad_out: typing.Any,
    out: typing.Any,
    stream: int,
) -> None: ...
def mask_blocks(
    op: str, mask: typing.Any, starts: typing.Any, lengths: typing.Any, num_threads: int
) -> None: ...
def mask_counts(
    mask: typing.Any, cu_seqlens: typing.Any, counts: typing.Any, num_threads: int
) -> None: ...
def masked_logprob_loss(
    logits: typing.Any,
    target_ids: typing.Any,
    mask: typing.Any,
    kept_ids: typing.Any,
    kept_ranges: typing.Any,
    temperature: float,
    loss: int,
    kl: int,
    params: collections.abc.Sequence[float],
    old_logprobs: typing.Any,
    advantages: typing.Any,
    ref_logprobs: typing.Any,
    token_weights: typing.Any,
    cross_entropy_weights: typing.Any,
    kl_weights: typing.Any,
    row_weights: typing.Any,
    logprobs: typing.Any,
    entropy: typing.Any,
    grad: typing.Any,
    num_threads: int,
) -> None: ...
def masked_logprob_loss_cuda(
    logits: typing.Any,
    target_ids: typing.Any,
    mask: typing.Any,
    kept_ids: typing.Any,
    kept_ranges: typing.Any,
    temperature: float,
    loss: int,
    kl: int,
    params: collections.abc.Sequence[float],
    old_logprobs: typing.Any,
    advantages: typing.Any,
    ref_logprobs: typing.Any,
    token_weights: typing.Any,
    cross_entropy_weights: typing.Any,
    kl_weights: typing.Any,
    row_weights: typing.Any,
    logprobs: typing.Any,
    entropy: typing.Any,
    grad: typing.Any,
    stream: int,
) -> None: ...
def merge_plan_flat(
    op: str,
    tokens: typing.Any,
    cu_seqlens: typing.Any,
    rows: tuple,
    max_drift_tokens: int,
    out: tuple,
    num_threads: int,
) -> None: ...
def merge_plan_rows(
    op: str,
    prompts: Rows,
    responses: Rows,
    rows: tuple,
    max_drift_tokens: int,
    out: tuple,
    num_threads: int,
) -> None: ...
def merge_routes(op: str, counts: typing.Any, plan: tuple, out: tuple) -> int: ...
def multiply_rows(
    values: typing.Any, mask: typing.Any, out: typing.Any, counts: typing.Any, num_threads: int
) -> None: ...
def off_policy_correction(
    old_logprobs: typing.Any,
    rollout_logprobs: typing.Any,
    mask: typing.Any,
    cu_seqlens: typing.Any,
    starts: typing.Any,
    order: typing.Any,
    outliers: bool,
    bounded: bool,
    tis: int,
    sequence_mask: int,
    numbers: collections.abc.Sequence[float],
    new_mask: typing.Any,
    row_weights: typing.Any,
    metrics: typing.Any,
    num_threads: int,
) -> None: ...
def padded_to_flat(
    padded: typing.Any,
    cu_seqlens: typing.Any,
    starts: typing.Any,
    flat: typing.Any,
    positions: typing.Any,
    num_threads: int,
) -> None: ...
def padded_to_flat_cuda(
    padded: typing.Any,
    cu_seqlens: typing.Any,
    starts: typing.Any,
    flat: typing.Any,
    positions: typing.Any,
    stream: int,
) -> None: ...
def page_pool_idle_bytes() -> int: ...
def page_pool_limit() -> int: ...
def plan_visit(vocab: int, item_size: int, major: int) -> tuple: ...
def policy_loss(
    logprobs: typing.Any,
    old_logprobs: typing.Any,
    advantages: typing.Any,
    mask: typing.Any,
    row_weights: typing.Any,
    cu_seqlens: typing.Any,
    ref_logprobs: typing.Any,
    token_weights: typing.Any,
    cross_entropy_weights: typing.Any,
    kl_weights: typing.Any,
    selected: typing.Any,
    sequence_delta: typing.Any,
    loss: int,
    kl: int,
    params: collections.abc.Sequence[float],
    grad: typing.Any,
    metrics: typing.Any,
    num_threads: int,
) -> None: ...
def policy_loss_cuda(
    logprobs: typing.Any,
    old_logprobs: typing.Any,
    advantages: typing.Any,
    mask: typing.Any,
    row_weights: typing.Any,
    cu_seqlens: typing.Any,
    ref_logprobs: typing.Any,
    token_weights: typing.Any,
    cross_entropy_weights: typing.Any,
    kl_weights: typing.Any,
    selected: typing.Any,
    sequence_delta: typing.Any,
    loss: int,
    kl: int,
    params: collections.abc.Sequence[float],
    grad: typing.Any,
    metrics: typing.Any,
    partial: typing.Any,
    stream: int,
) -> None: ...
def scale_cells_cuda(cells: typing.Any, factor: typing.Any, stream: int) -> None: ...
def scale_rows_cuda(rows: typing.Any, factor: typing.Any, stream: int) -> None: ...
def selected_logprob(
    logits: typing.Any,
    target_ids: typing.Any,
    mask: typing.Any,
    kept_ids: typing.Any,
    kept_ranges: typing.Any,
    temperature: float,
    logprobs: typing.Any,
    lse: typing.Any,
    entropy: typing.Any,
    num_threads: int,
) -> None: ...
def selected_logprob_backward(
    logits: typing.Any,
    target_ids: typing.Any,
    mask: typing.Any,
    kept_ids: typing.Any,
    kept_ranges: typing.Any,
    temperature: float,
    lse: typing.Any,
    entropy: typing.Any,
    grad_logprobs: typing.Any,
    grad_entropy: typing.Any,
    grad: typing.Any,
    num_threads: int,
) -> None: ...
def selected_logprob_backward_cuda(
    logits: typing.Any,
    target_ids: typing.Any,
    mask: typing.Any,
    kept_ids: typing.Any,
    kept_ranges: typing.Any,
    temperature: float,
    lse: typing.Any,
    entropy: typing.Any,
    grad_logprobs: typing.Any,
    grad_entropy: typing.Any,
    grad: typing.Any,
    stream: int,
) -> None: ...
def selected_logprob_cuda(
    logits: typing.Any,
    target_ids: typing.Any,
    mask: typing.Any,
    kept_ids: typing.Any,
    kept_ranges: typing.Any,
    temperature: float,
    logprobs: typing.Any,
    lse: typing.Any,
    entropy: typing.Any,
    stream: int,
) -> None: ...
def set_page_pool_limit(num_bytes: int) -> None: ...
def set_simd_level(name: str) -> None: ...
def simd_level() -> str: ...
def sum_rows(
    cells: typing.Any, cu_seqlens: typing.Any, sums: typing.Any, num_threads: int
) -> None: ...
def token_chain(
    op: str,
    num_rows: int,
    rewards: typing.Any,
    values: typing.Any,
    is_last_step: typing.Any,
    mask: typing.Any,
    cu_seqlens: typing.Any,
    rewards_are_ragged: bool,
    gamma: float,
    lambd: float,
    normalize: bool,
    advantages: typing.Any,
    returns: typing.Any,
    num_threads: int,
) -> None: ...
def turn_group_advantage(
    rewards: typing.Any,
    group_ids: typing.Any,
    is_last_step: typing.Any,
    mask: typing.Any,
    cu_seqlens: typing.Any,
    rewards_are_ragged: bool,
    gamma: float,
    baseline: int,
    scale_by_std: bool,
    out: typing.Any,
    num_threads: int,
) -> None: ...
def turn_level_returns(
    num_rows: int,
    rewards: typing.Any,
    is_last_step: typing.Any,
    mask: typing.Any,
    cu_seqlens: typing.Any,
    rewards_are_ragged: bool,
    gamma: float,
    out: typing.Any,
    num_threads: int,
) -> None: ...
def visit_code_major() -> int: ...

cells_per_sum: int = 2048
compiler: str
cuda_archs: str | None
num_loss_sums: int = 16
