"""Trees beyond the budget: their units, and the memory of one path. Gradients: test_tree_training.

The values are those of the whole tree there, with windows, chunks, sinks and states.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _fakes import tiny_model
from _trees import agent_batch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast.ops.prefix_tree.attention import node_depths
from skyrl_fast.ops.prefix_tree.tree import build_prefix_tree
from skyrl_fast.train.memory.activations import StorageTracker
from skyrl_fast.train.model.depth_first import tree_units
from skyrl_fast.train.model.micro_batch import plan_micro_batches
from skyrl_fast.train.model.policy import Policy

ROWS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=12)


@pytest.mark.spec("tree.paths")
@given(rows=ROWS, budget=st.integers(1, 30))
def test_units_are_a_partition_within_the_budget(rows: list[list[int]], budget: int) -> None:
    tokens = torch.tensor([token for row in rows for token in row])
    tree = build_prefix_tree(tokens, torch.tensor([0, *map(len, rows)]).cumsum(0))
    depths, ends = node_depths(tree.ends).tolist(), tree.ends.tolist()
    units = tree_units(ends, depths, budget)
    assert [unit.first for unit in units] == [0, *(unit.last for unit in units[:-1])]
    assert units[-1].last == tree.num_nodes
    chains: list[Any] = []
    for unit in units:
        del chains[unit.level :]
        assert len(chains) == unit.level
        # What is above the unit is all chains above it, and nothing else.
        assert sum(chain.last - chain.first for chain in chains) == depths[unit.first]
        assert all(ends[chain.last - 1] >= unit.last for chain in chains)
        path = depths[unit.first] + unit.last - unit.first
        is_chain = all(ends[node] == ends[unit.first] for node in range(unit.first, unit.last))
        assert path <= budget or is_chain
        if unit.continues:
            assert is_chain and path + 1 <= max(depths) + 1
            chains.append(unit)


@pytest.mark.spec("tree.paths")
def test_one_path_of_activations_is_in_memory() -> None:
    # 8 branches of 100 nodes under 100: a path has 200 of 900
    shared = torch.arange(100) % 7
    rows = [torch.cat([shared, torch.tensor([8 + n]), torch.arange(99) % 7]) for n in range(8)]
    tree = build_prefix_tree(torch.cat(rows), torch.arange(9) * 200)
    assert tree.num_nodes == 900
    model = tiny_model(seed=1)
    peaks = []
    for budget in (900, 200):
        policy = Policy(model, tree=True, max_tokens_per_microbatch=budget)
        peaks.append(_peak(policy, tree))
    # The weights' gradients and the hidden states of all nodes are in both.
    assert peaks[1] < 0.4 * peaks[0]


def _peak(policy: Policy, tree: Any) -> int:
    from skyrl_fast.train.model.forward_pass import MicroBatch, NodeTree
    from skyrl_fast.train.model.tree_forward import last_hidden_states

    nothing = torch.zeros(0, dtype=torch.int64)
    nodes = NodeTree(tree.parents, tree.ends, tree.positions.long()[None])
    micro = MicroBatch(tree.tokens.long()[None], *[nothing] * 4, tree=nodes)
    policy.model.zero_grad()
    with StorageTracker([*policy.model.parameters(), *policy.model.buffers()]) as tracker:
        hidden = last_hidden_states(
            policy.backbone, micro, policy.device, most_nodes=policy.max_tokens_per_microbatch
        )
        hidden.sum().backward()
    return tracker.peak


@pytest.mark.spec("tree.paths")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_of_a_policy_beyond_its_budget(dtype: torch.dtype) -> None:
    batch = agent_batch(3)
    (micro,) = plan_micro_batches(batch, 1 << 40, tree=True)
    weights = torch.randn(len(micro.response_index), generator=torch.Generator().manual_seed(0))
    results = []
    for budget in (1 << 40, 30):
        policy = Policy(tiny_model(seed=1), tree=True, dtype=dtype)
        policy.max_tokens_per_microbatch = budget
        values, _ = policy.logprobs(micro)
        (values * weights).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
        results.append((values.detach(), gradient))
    (values, gradient), (path_values, path_gradient) = results
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2  # rounding of other kernels
    torch.testing.assert_close(path_values, values, atol=tolerance, rtol=tolerance)
    assert float((path_gradient - gradient).norm()) <= tolerance * float(gradient.norm())
