"""Random generator outputs in SkyRL's format, also invalid ones, and comparison of results."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

TOKENS = st.integers(0, 9)
FLOATS = st.floats(-2, 2, width=32)


@st.composite
def generator_outputs(draw: st.DrawFn, *, step_wise: bool = True, odd: bool = True) -> dict:
    """Draw groups of step-wise trajectories with mostly growing contexts, sometimes invalid."""
    from skyrl.train.generators.base import TrajectoryID

    rows: dict[str, list[Any]] = {
        name: [] for name in ("prompt_token_ids", "response_ids", "loss_masks", "rewards")
    }
    ids, last, logprobs = [], [], []
    per_token = draw(st.booleans())
    sparse = draw(st.booleans())
    for group in range(draw(st.integers(1, 3))):
        for repetition in range(draw(st.integers(1, 3))):
            context = draw(st.lists(TOKENS, min_size=1, max_size=4))
            steps = draw(st.integers(1, 4)) if step_wise else 1
            for step in range(steps):
                response = draw(st.lists(TOKENS, min_size=0 if odd else 1, max_size=5))
                rows["prompt_token_ids"].append(list(context))
                rows["response_ids"].append(response)
                mask = draw(st.lists(st.integers(0, 1), min_size=len(response), max_size=5))
                rows["loss_masks"].append(mask[: len(response)])
                token_rewards = [0.0] * len(response)
                if response and draw(st.booleans()):
                    token_rewards[-1] = draw(FLOATS)
                if not sparse:
                    token_rewards = [draw(FLOATS) for _ in response]
                rows["rewards"].append(token_rewards if per_token else draw(FLOATS))
                logprobs.append([draw(FLOATS) for _ in response])
                ids.append(TrajectoryID(f"p{group}", repetition))
                last.append(step + 1 == steps)
                grow = draw(st.integers(0, 5))
                if grow:
                    context = [*context, *response, *draw(st.lists(TOKENS, max_size=3))]
                else:
                    context = draw(st.lists(TOKENS, min_size=1, max_size=4))
    size = len(ids)
    output: dict[str, Any] = {
        **rows,
        "rollout_logprobs": logprobs if draw(st.booleans()) else None,
        "stop_reasons": draw(st.sampled_from([None, ["stop"] * size, ["length"] * size])),
        "rollout_metrics": draw(
            st.sampled_from([None, {}, {"env/mean_x": 1.5, "env/max_y": 2, "env/z": 3.0}])
        ),
    }
    if step_wise:
        output |= {"trajectory_ids": ids, "is_last_step": last}
    if draw(st.booleans()):
        seconds = [draw(st.floats(0.1, 9)) for _ in ids]
        output["trajectory_generation_times"] = seconds
        if draw(st.booleans()):
            output["trajectory_time_splits"] = {"llm": [s / 2 for s in seconds], "env": seconds}
    if draw(st.booleans()):
        output["env_metrics"] = [{"turns": i} for i in range(size)]
    if draw(st.integers(0, 3)) == 0:
        output["rollout_sample_support"] = supports(draw, output)
    if odd and draw(st.integers(0, 2)) == 0:
        draw(st.sampled_from(BREAKS))(draw, output)
    return output


def supports(draw: st.DrawFn, output: dict) -> Any:
    """Draw SkyRL 0.4.0's ids that sampling could choose from, per response token; sometimes odd."""
    dtype = draw(st.sampled_from([np.int32, np.int32, np.int64]))
    rows: list[Any] = [
        np.arange(2 * len(row), dtype=dtype).reshape(len(row), 2) for row in output["response_ids"]
    ]
    if draw(st.integers(0, 3)) == 0:
        row = draw(st.integers(0, len(rows) - 1))
        rows[row] = draw(st.sampled_from([None, rows[row][:, :1], rows[row][1:], []]))
    return draw(st.sampled_from([rows, rows, rows[1:], tuple(rows)]))


def _drop(draw: st.DrawFn, output: dict) -> None:
    del output[draw(st.sampled_from(sorted(output)))]


def _nothing(draw: st.DrawFn, output: dict) -> None:
    output[draw(st.sampled_from(sorted(output)))] = None


def _shorter(draw: st.DrawFn, output: dict) -> None:
    name = draw(st.sampled_from([k for k, v in output.items() if isinstance(v, list)]))
    output[name] = output[name][:-1]


def _shorter_row(draw: st.DrawFn, output: dict) -> None:
    name = draw(st.sampled_from(["loss_masks", "rewards", "rollout_logprobs", "response_ids"]))
    rows = output.get(name)
    if rows and isinstance(rows[0], list):
        row = draw(st.integers(0, len(rows) - 1))
        rows[row] = rows[row][:-1]


def _longer_row(draw: st.DrawFn, output: dict) -> None:
    name = draw(st.sampled_from(["loss_masks", "rewards", "rollout_logprobs"]))
    rows = output.get(name)
    if rows and isinstance(rows[0], list):
        rows[draw(st.integers(0, len(rows) - 1))].append(1)


def _element(draw: st.DrawFn, output: dict) -> None:
    name = draw(st.sampled_from(["prompt_token_ids", "response_ids", "loss_masks", "rewards"]))
    row = draw(st.integers(0, len(output["response_ids"]) - 1))
    values = [-1, 1.5, True, None, "x", 2**40, 2**70, float("nan"), float("inf"), 1e300, 300]
    value = draw(st.sampled_from(values))
    if isinstance(output[name][row], list):
        if output[name][row]:
            output[name][row][-1] = value
    else:
        output[name][row] = value


def _other_rows(draw: st.DrawFn, output: dict) -> None:
    name = draw(st.sampled_from(["prompt_token_ids", "response_ids", "loss_masks", "rewards"]))
    kind = draw(st.sampled_from([tuple, np.array, torch.tensor]))
    rows = output[name]
    row = draw(st.integers(0, len(rows) - 1))
    every = draw(st.booleans())
    output[name] = [
        kind(value) if (every or i == row) and isinstance(value, list) else value
        for i, value in enumerate(rows)
    ]


def _flags(draw: st.DrawFn, output: dict) -> None:
    flags = output.get("is_last_step")
    if flags:
        row = draw(st.integers(0, len(flags) - 1))
        flags[row] = draw(st.sampled_from([not flags[row], np.bool_(flags[row]), int(flags[row])]))


def _ids(draw: st.DrawFn, output: dict) -> None:
    ids = output.get("trajectory_ids")
    if ids:
        row = draw(st.integers(0, len(ids) - 1))
        ids[row] = draw(st.sampled_from([ids[0], ids[-1], ("p0", 0), "p0_0"]))


def _unmasked(draw: st.DrawFn, output: dict) -> None:
    value = draw(st.sampled_from([0, 0.5, 1.0, True, 2]))
    output["loss_masks"] = [[value] * len(row) for row in output["loss_masks"]]


def _extra(draw: st.DrawFn, output: dict) -> None:
    size = len(output["response_ids"])
    name = draw(
        st.sampled_from(["pixel_values", "image_grid_thw", "mine", "rollout_expert_indices"])
    )
    value = [np.zeros((1, 1, 2), np.uint8)] * size
    output[name] = draw(st.sampled_from([value, value[1:], {"a": value}, "text", 7]))


def _empty(draw: st.DrawFn, output: dict) -> None:
    for name, value in output.items():
        if isinstance(value, list):
            output[name] = []


BREAKS = (
    _drop, _nothing, _shorter, _shorter_row, _longer_row, _element, _other_rows, _flags, _ids,
    _unmasked, _extra, _empty,
)  # fmt: skip


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ("returns", result) or ("raises", type); the arguments are copied first."""
    args, kwargs = copy.deepcopy((args, kwargs))
    try:
        return "returns", function(*args, **kwargs)
    except Exception as error:
        return "raises", type(error)


def same(a: Any, b: Any) -> bool:
    """Return whether two results are equal, with types, dtypes and NaN; tensors bit for bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
    if type(a) is not type(b):
        return False
    if hasattr(a, "cu_seqlens"):  # SkyRL's PackedTensor
        return same((a.values, a.cu_seqlens), (b.values, b.cu_seqlens))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(a, b))
    return bool(a == b) or (a != a and b != b)


def assert_same_outcome(original: Any, ours: Any) -> None:
    """Assert that both returned the same, or raised the same type."""
    assert original[0] == ours[0], f"SkyRL {original}, here {ours}"
    if original[0] == "raises":
        assert original[1] is ours[1], f"SkyRL raises {original[1]}, here {ours[1]}"
    else:
        assert same(original[1], ours[1]), f"SkyRL {original[1]}\nhere {ours[1]}"
