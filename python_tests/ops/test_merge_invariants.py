"""Merging of random trajectories: lists, batches and plans equal a simple greedy merge."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from _rows import assert_same
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast import merge_steps, merge_stepwise_output
from skyrl_fast.batch import StepBatch
from skyrl_fast.batch.generator_output import validate_generator_output
from skyrl_fast.ops.merge.steps import merge_flat_steps

LISTS = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")


def greedy(output: dict[str, Any], drift: str, most: int) -> list[dict[str, Any]]:
    """Merge token by token, as the specification says."""
    rows: list[dict[str, Any]] = []
    for i, prompt in enumerate(output["prompt_token_ids"]):
        run = rows[-1] if rows and rows[-1]["id"] == output["trajectory_ids"][i] else None
        step = {
            "tokens": list(prompt) + list(output["response_ids"][i]),
            "mask": [0] * len(prompt) + output["loss_masks"][i],
            "logprobs": [0.0] * len(prompt) + output["rollout_logprobs"][i],
            "rewards": [0.0] * len(prompt) + output["rewards"][i],
        }
        routes = output["rollout_expert_indices"][i].tolist()
        same = 0
        if run is not None:
            while (
                same < min(len(run["tokens"]), len(prompt)) and run["tokens"][same] == prompt[same]
            ):
                same += 1
        if run is None or not may_join(run, same, drift, most):
            rows.append({"prompt": list(prompt), "head": i, "routes": routes, **step})
        else:
            lost = run["rewards"][same:]
            for field, values in step.items():
                run[field] = run[field][:same] + values[same:]
            if lost:
                run["rewards"][same - 1] += sum(lost)
            recorded = run["routes"][:same]
            run["routes"] = recorded + routes[len(recorded) :]
        rows[-1] |= {"id": output["trajectory_ids"][i], "end": i}
    return rows


def may_join(run: dict[str, Any], same: int, drift: str, most: int) -> bool:
    lost = len(run["tokens"]) - same
    if lost == 0:
        return True
    if drift == "fork" or lost > most or 1 not in run["mask"]:
        return False
    stretch = len(run["mask"]) - 1 - run["mask"][::-1].index(1)
    while stretch > 0 and run["mask"][stretch - 1]:
        stretch -= 1
    return same > stretch


def eighths(draw: Any, size: int) -> list[float]:
    """Draw floats whose sums are exact."""
    return [n / 8 for n in draw(st.lists(st.integers(-16, 16), min_size=size, max_size=size))]


@st.composite
def outputs(draw: Any) -> dict[str, Any]:
    """Draw trajectories whose contexts mostly grow, sometimes drift, sometimes are reset."""
    token = st.integers(1, 3)
    output: dict[str, Any] = {name: [] for name in (*LISTS, "rewards", "trajectory_ids")}
    output |= {"is_last_step": [], "rollout_expert_indices": [], "policy_versions": []}
    for j in range(draw(st.integers(1, 3))):
        turns = draw(st.integers(1, 5))
        context = draw(st.lists(token, max_size=4))
        captured = 0
        for turn in range(turns):
            response = draw(st.lists(token, max_size=4))
            mask = draw(st.lists(st.integers(0, 1), min_size=len(response), max_size=len(response)))
            if draw(st.integers(0, 3)):
                mask = [1] * len(response)
            tokens = len(context) + len(response)
            count = draw(st.sampled_from([0, tokens, max(captured, tokens - 1)]))
            captured = max(count, captured)
            output["prompt_token_ids"].append(list(context))
            output["response_ids"].append(response)
            output["loss_masks"].append(mask)
            output["rollout_logprobs"].append(eighths(draw, len(response)))
            output["rewards"].append(eighths(draw, len(response)))
            output["trajectory_ids"].append(("g", j))
            output["is_last_step"].append(turn == turns - 1)
            output["policy_versions"].append(draw(st.integers(0, 5)))
            output["rollout_expert_indices"].append(
                np.arange(count, dtype=np.uint8).reshape(-1, 1, 1) + np.uint8(10 * turn)
            )
            full = context + response
            cut = len(full)
            if draw(st.integers(0, 2)) == 0:
                cut = draw(st.integers(max(0, len(full) - 4), len(full)))
            context = full[:cut] + draw(st.lists(token, max_size=3))
            same = [a == b for a, b in zip(full, context, strict=False)] + [False]
            captured = min(captured, same.index(False))
    return output


DRIFTS = ("fork", "realign")
MOST = st.sampled_from((0, 2, 8))


@pytest.mark.spec(
    "merge.greedy", "merge.drift-dropped-tokens", "merge.drift-rewards", "merge.drift-routes"
)
@pytest.mark.parametrize("drift", DRIFTS)
@given(output=outputs(), most=MOST)
def test_lists_equal_the_greedy_reference(output: dict[str, Any], drift: str, most: int) -> None:
    before = copy.deepcopy(output)
    merged = merge_stepwise_output(output, drift=drift, max_drift_tokens=most)
    wanted = greedy(output, drift, most)
    lengths = [len(row["prompt"]) for row in wanted]
    assert merged["prompt_token_ids"] == [row["prompt"] for row in wanted]
    for field, name in (
        ("response_ids", "tokens"),
        ("loss_masks", "mask"),
        ("rollout_logprobs", "logprobs"),
        ("rewards", "rewards"),
    ):
        parts = zip(wanted, lengths, strict=True)
        assert merged[field] == [row[name][n:] for row, n in parts], field
    got = [rows.tolist() for rows in merged["rollout_expert_indices"]]
    assert got == [row["routes"] for row in wanted]
    ends, heads = [row["end"] for row in wanted], [row["head"] for row in wanted]
    assert merged["is_last_step"] == [output["is_last_step"][end] for end in ends]
    assert merged["policy_versions"] == [
        min(output["policy_versions"][a : b + 1]) for a, b in zip(heads, ends, strict=True)
    ]
    validate_generator_output(merged, step_wise=True)
    for field, rows in before.items():  # the input is unchanged
        assert all(np.array_equal(a, b) for a, b in zip(rows, output[field], strict=True)), field


@pytest.mark.spec(
    "merge.tokens-kept",
    "merge.sums-kept",
    "merge.order-kept",
    "merge.idempotent",
    "merge.drift-sums",
)
@pytest.mark.parametrize("drift", DRIFTS)
@given(output=outputs(), most=MOST)
def test_invariants(output: dict[str, Any], drift: str, most: int) -> None:
    merged = merge_stepwise_output(output, drift=drift, max_drift_tokens=most)
    plan = merge_steps(
        output["prompt_token_ids"],
        output["response_ids"],
        [j for _, j in output["trajectory_ids"]],
        loss_masks=output["loss_masks"],
        drift=drift,
        max_drift_tokens=most,
    )
    prompts, responses = output["prompt_token_ids"], output["response_ids"]
    for row, end in enumerate(plan.ends.tolist()):
        tokens = merged["prompt_token_ids"][row] + merged["response_ids"][row]
        assert tokens == prompts[end] + responses[end]
    flat_rewards = [sum(map(sum, o["rewards"])) for o in (output, merged)]
    # A response without tokens has no token for its reward, so sums are exact.
    assert flat_rewards[0] == flat_rewards[1]
    trained = [sum(map(sum, o["loss_masks"])) for o in (output, merged)]
    assert trained[1] <= trained[0]
    if drift == "fork" or most == 0:
        assert trained[1] == trained[0]
    assert list(dict.fromkeys(merged["trajectory_ids"])) == list(
        dict.fromkeys(output["trajectory_ids"])
    )
    again = merge_stepwise_output(merged, drift=drift, max_drift_tokens=most)
    for field, value in merged.items():
        assert all(np.array_equal(a, b) for a, b in zip(value, again[field], strict=True)), field


@pytest.mark.parametrize("drift", DRIFTS)
@given(output=outputs(), most=MOST, scalar=st.booleans(), logprobs=st.booleans())
def test_batches_equal_lists(
    output: dict[str, Any], drift: str, most: int, scalar: bool, logprobs: bool
) -> None:
    if scalar:
        output["rewards"] = [math.fsum(row) for row in output["rewards"]]
    if not logprobs:
        output["rollout_logprobs"] = None
    options = {"drift": drift, "max_drift_tokens": most}
    wanted = StepBatch.from_generator_output(merge_stepwise_output(output, **options))
    merged = StepBatch.from_generator_output(output).merged(**options)
    direct = StepBatch.from_generator_output(output, merge=drift, max_drift_tokens=most)
    if wanted.expert_indices is not None:  # the smallest dtype depends on what is left
        wanted = wanted.with_(expert_indices=wanted.expert_indices.to(merged.expert_indices.dtype))
    assert_same(merged, wanted)
    assert_same(direct, wanted)


@pytest.mark.parametrize("kind", ["lists", "shared", "fresh", "int64", "int32", "mixed", "strided"])
@given(output=outputs(), most=MOST)
def test_plans_equal_the_reference(output: dict[str, Any], kind: str, most: int) -> None:
    ids = [j for _, j in output["trajectory_ids"]]
    prompts, responses = output["prompt_token_ids"], output["response_ids"]
    if kind in ("shared", "fresh"):  # distinct int objects
        big = {n: 100_000 + n for n in range(4)}
        make = big.__getitem__ if kind == "shared" else lambda n: int(str(100_000 + n))
        prompts, responses = ([[make(n) for n in r] for r in rows] for rows in (prompts, responses))
    elif kind in ("int64", "int32"):
        prompts, responses = ([np.array(r, kind) for r in rows] for rows in (prompts, responses))
    elif kind == "mixed":
        prompts = [np.array(r, np.int16) if i % 2 else r for i, r in enumerate(prompts)]
        responses = [torch.tensor(r, dtype=torch.int64) for r in responses]
    elif kind == "strided":
        prompts = [np.repeat(np.array(r, np.int64), 2)[::2] for r in prompts]
        responses = [tuple(r) for r in responses]
    for drift in DRIFTS:
        options = {"loss_masks": output["loss_masks"], "drift": drift, "max_drift_tokens": most}
        got = merge_steps(prompts, responses, ids, **options)
        wanted = merge_steps(prompts, responses, ids, **options, backend="torch")
        assert got.joins.tolist() == wanted.joins.tolist()
        assert got.limits.tolist() == wanted.limits.tolist()
        assert got.overlaps[got.joins].tolist() == wanted.overlaps[got.joins].tolist()


@pytest.mark.parametrize("threads", [1, 3])
def test_large_flat_rows_equal_the_reference(threads: int) -> None:
    rng = np.random.default_rng(0)
    prompts, responses, ids = [], [], []
    for j in range(40):
        context = rng.integers(0, 9, 700).tolist()
        for _ in range(4):
            prompts.append(list(context))
            responses.append(rng.integers(0, 9, 65).tolist())
            ids.append(j)
            context = context + responses[-1]
            if rng.random() < 0.3:
                context[rng.integers(0, len(context))] ^= 8
    wanted = merge_steps(prompts, responses, ids, backend="torch")
    assert 0 < wanted.joins.sum() < 120
    lengths = torch.tensor([len(p) + 65 for p in prompts])
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = [t for p, r in zip(prompts, responses, strict=True) for t in p + r]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for dtype in (torch.int32, torch.int64):
            plan = merge_flat_steps(
                torch.tensor(tokens, dtype=torch.int32),
                cu.to(dtype),
                torch.arange(161, dtype=dtype) * 65,
                torch.tensor(ids, dtype=torch.int32),
            )
            assert plan.joins.tolist() == wanted.joins.tolist()
        arrays = [np.array(p) for p in prompts], [np.array(r) for r in responses]
        assert merge_steps(*arrays, ids).joins.tolist() == wanted.joins.tolist()
    finally:
        torch.set_num_threads(before)
