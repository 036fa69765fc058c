"""Sampling replay: log-probabilities over the tokens that each token was sampled from."""

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers._fakes import tiny_model
from helpers._trees import agent_batch

from skyrl_fast.adapters.generator_output import generator_output_from_trajectories
from skyrl_fast.batch import StepBatch, batch_from_trajectories, concatenate
from skyrl_fast.batch.generator_merge import merge_stepwise_output
from skyrl_fast.config import AlgorithmConfig, SamplingParams
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.update import accumulate_gradient

VOCAB = tiny_model().config.vocab_size


def with_kept(batch: StepBatch, seed: int = 0) -> StepBatch:
    """Return the batch with random sets that contain each token; a fifth are the vocabulary.

    A set depends on the token and its position in the row, so that rows of a prompt share some.
    """
    sets: list[np.ndarray] = []
    tokens, cu = batch.tokens.tolist(), batch.cu_seqlens.tolist()
    for row, length in enumerate(batch.response_lengths.tolist()):
        for place in range(length):
            position = cu[row + 1] - length + place
            token = tokens[position]
            rng = np.random.default_rng([seed, token, position - cu[row], row % 3])
            others = rng.integers(0, VOCAB, int(rng.integers(0, 9)))
            whole = rng.random() < 0.2
            sets.append(np.unique(np.append(others, token))[: 0 if whole else None])
    counts = np.array([len(one) for one in sets], np.int32)
    bounds = np.concatenate([[0], np.cumsum(counts)])
    return batch.with_(
        num_kept=torch.from_numpy(counts),
        kept_ids=torch.from_numpy(np.concatenate(sets).astype(np.int32)),
        cu_kept=torch.from_numpy(bounds[batch.cu_responses.numpy()].astype(np.int32)),
    )


def kept_sets(batch: StepBatch) -> list[list[list[int]]]:
    """Return the ids per row and response token."""
    ends = [0, *batch.num_kept.cumsum(0).tolist()]
    flat = [batch.kept_ids[a:b].tolist() for a, b in pairwise(ends)]
    rows = [flat[a:b] for a, b in pairwise(batch.cu_responses.tolist())]
    starts = [0, *np.cumsum([sum(map(len, row)) for row in rows]).tolist()]
    assert batch.cu_kept.tolist() == starts
    return rows


def expected_logprobs(model: Any, batch: StepBatch, temperature: float) -> torch.Tensor:
    """Return (A,) by one forward pass per row and a softmax over each token's set."""
    result = []
    with torch.no_grad():
        for row, sets in enumerate(kept_sets(batch)):
            ids = batch.tokens[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]].long()
            logits = model(ids[None]).logits[0].double() / temperature
            first = len(ids) - len(sets)
            for place, kept in enumerate(sets):
                scores = logits[first + place - 1]
                chosen = scores[kept] if kept else scores
                result.append(scores[ids[first + place]] - chosen.logsumexp(0))
    return torch.stack(result)


@pytest.mark.spec("kept.logprobs")
@pytest.mark.parametrize("tree", [False, True])
def test_rows_and_trees_normalize_over_each_tokens_set(tree: bool) -> None:
    model, batch = tiny_model(), with_kept(agent_batch(1))
    policy = Policy(model, temperature=0.7, tree=tree, max_tokens_per_microbatch=64)
    got = policy.batch_logprobs(batch)
    wanted = expected_logprobs(model, batch, 0.7) * batch.loss_mask
    assert (got - wanted).abs().max() < 1e-5  # float32 against float64
    plain = policy.batch_logprobs(batch.with_(num_kept=None, kept_ids=None, cu_kept=None))
    assert (got - plain).abs().max() > 0.5


@pytest.mark.spec("kept.logprobs")
def test_gradient_of_a_tree_is_that_of_rows() -> None:
    batch, grads = with_kept(agent_batch(2)), []
    for tree in (False, True):
        model = tiny_model()
        policy = Policy(model, tree=tree, max_tokens_per_microbatch=96)
        accumulate_gradient(policy, batch, algorithm=AlgorithmConfig())
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (grads[0] - grads[1]).abs().max() < 1e-6 * grads[0].abs().max().clamp(min=1)


@pytest.mark.spec("kept.batch-operations")
def test_batch_operations_keep_each_tokens_set(tmp_path: Path) -> None:
    batch = with_kept(agent_batch(3))
    sets = kept_sets(batch)
    chosen = [4, 1, 6]
    assert kept_sets(batch.rows(chosen)) == [sets[row] for row in chosen]
    assert kept_sets(batch.rows(slice(2, 7))) == sets[2:7]
    minis = batch.mini_batches(1)
    assert [one for mini in minis for one in kept_sets(mini)] == sets
    assert kept_sets(concatenate(minis)) == sets
    batch.save(tmp_path / "batch")
    assert kept_sets(StepBatch.load(tmp_path / "batch")) == sets


@pytest.mark.spec("kept.batch-operations")
def test_merged_steps_keep_the_sets_of_sampled_tokens() -> None:
    steps = with_kept(agent_batch(4, stripped=0.0)).with_(advantages=None)
    merged = steps.merged()
    assert merged.num_rows < steps.num_rows
    sampled = [one for row in kept_sets(steps) for one in row if one]
    assert sorted(one for row in kept_sets(merged) for one in row if one) == sorted(sampled)
    model = tiny_model()
    wanted = expected_logprobs(model, merged, 1.0) * merged.loss_mask
    assert (Policy(model).batch_logprobs(merged) - wanted).abs().max() < 2e-6


def trajectory(kept_ids: Any, uid: str = "a") -> Trajectory:
    first = Step([1, 2], [5, 6], [1, 1], [-0.5, -0.1], 0.0, "stop", 0, "", "", 0.0, 0.0)
    last = Step([1, 2, 5, 6, 9], [7], [1], [-0.2], 1.0, "stop", 0, "", "", 0.0, 0.0)
    first.kept_ids, last.kept_ids = kept_ids
    return Trajectory(uid, 0, [first, last], "stop", "env", {}, 0.0)


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


@pytest.mark.spec("kept.record")
def test_trajectories_and_generator_outputs_carry_the_sets() -> None:
    one = trajectory(([ids(4, 5), ids(6, 7, 8)], [ids()]))
    batch = batch_from_trajectories([one])
    assert kept_sets(batch) == [[[4, 5], [6, 7, 8]], [[]]]
    output = generator_output_from_trajectories([one])
    again = StepBatch.from_generator_output(output, step_wise=True)
    assert kept_sets(again) == kept_sets(batch)
    merged = [[[4, 5], [6, 7, 8], [], []]]
    assert kept_sets(batch.merged()) == merged
    assert kept_sets(StepBatch.from_generator_output(output, merge="fork")) == merged
    lists = merge_stepwise_output(output)["rollout_kept_ids"]
    assert [[one.tolist() for one in row] for row in lists] == merged


@pytest.mark.parametrize(
    ("kept_ids", "got"),
    [
        (([ids(5)], [ids(7)]), "(2) in row 0, got 1"),
        (([ids(5), ids(6)], [ids(7), ids(8)]), "(1) in row 1, got 2"),
    ],
)
def test_sets_for_only_some_tokens_are_refused(kept_ids: Any, got: str) -> None:
    with pytest.raises(ValueError, match="kept_ids: expected one entry per response token") as e:
        batch_from_trajectories([trajectory(kept_ids)])
    assert got in str(e.value)


def test_rows_without_sets_are_of_the_vocabulary() -> None:
    """As the answers of an agent of which only some must have a form."""
    mixed = batch_from_trajectories([trajectory(([ids(4, 5), ids(6)], None))])
    assert kept_sets(mixed) == [[[4, 5], [6]], [[]]]
    output = generator_output_from_trajectories([trajectory(([ids(4, 5), ids(6)], None))])
    assert kept_sets(StepBatch.from_generator_output(output, step_wise=True)) == kept_sets(mixed)
    plain = batch_from_trajectories([trajectory((None, None), "b")])
    assert plain.num_kept is None
    assert kept_sets(concatenate([plain, mixed])) == [[[], []], [[]], [[4, 5], [6]], [[]]]
    assert (
        concatenate([plain, batch_from_trajectories([trajectory((None, None))])]).kept_ids is None
    )


SAMPLINGS = {
    "top_p 0.8": {"top_p": 0.8},
    "top_p 0.95": {"top_p": 0.95, "temperature": 0.7},
    "top_k 20": {"top_k": 20},
    "min_p 0.05": {"min_p": 0.05},
    "allowed": {"additional_kwargs": {"allowed_token_ids": list(range(3, 90))}},
}


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.spec("kept.ratio")
def test_ratio_of_unchanged_weights_is_one(tiny_model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    from skyrl_fast.rollout.engine.vllm_engine import VllmEngine
    from skyrl_fast.rollout.engine.vllm_start import VllmSetup

    async def sample() -> dict[str, list[Trajectory]]:
        found = {}
        async with VllmEngine(VllmSetup(str(tiny_model_folder), max_model_len=64)) as engine:
            for name, options in SAMPLINGS.items():
                sampling = SamplingParams(max_generate_length=24, **options)
                requests = [
                    engine.generate([40, 41], sampling, session_id=str(k), policy_version=0, seed=k)
                    for k in range(8)
                ]
                answers = await asyncio.gather(*requests)
                found[name] = [
                    Trajectory(
                        "a", k,
                        [Step([40, 41], g.token_ids, [1] * len(g.token_ids), g.logprobs, 0.0,
                              "stop", 0, "", "", 0.0, 0.0, kept_ids=g.kept_ids)],
                        "stop", "env", {}, 0.0,
                    )
                    for k, g in enumerate(answers)
                ]  # fmt: skip
        return found

    for name, trajectories in asyncio.run(sample()).items():
        batch = batch_from_trajectories(trajectories)
        temperature = SAMPLINGS[name].get("temperature", 1.0)
        for tree in (False, True):
            model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
            policy = Policy(model.eval(), temperature=temperature, tree=tree)
            ratios = (policy.batch_logprobs(batch) - batch.rollout_logprobs).exp()
            assert (ratios - 1).abs().max() < 1e-4, name
        plain = batch.with_(num_kept=None, kept_ids=None, cu_kept=None)
        biased = (policy.batch_logprobs(plain) - batch.rollout_logprobs).exp()
        assert (biased - 1).abs().max() > 1e-2, name  # what the recorded tokens account for
