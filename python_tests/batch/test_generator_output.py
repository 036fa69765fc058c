"""Construction and validation of generator outputs. Sections are those of docs/spec.md."""

import logging
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast.adapters.generator_output import generator_output_from_trajectories
from skyrl_fast.batch.generator_output import TrajectoryID, validate_generator_output
from skyrl_fast.rollout.trajectory import Step, Trajectory


def step_wise_output():
    """Group a: trajectories of 2 and 1 rows; group b: one of 2 rows."""
    return {
        "prompt_token_ids": [[1], [1, 2, 3], [1], [4], [4, 5, 6]],
        "response_ids": [[2], [7, 8], [9, 9], [5], [7]],
        "loss_masks": [[1], [1, 0], [1, 1], [1], [1]],
        "rewards": [0.0, 1.0, 0.0, 0.0, 1.0],
        "rollout_logprobs": [[-1.0], [-1.0, 0.0], [-1.0, -1.0], [-1.0], [-1.0]],
        "stop_reasons": ["stop"] * 5,
        "trajectory_ids": [("a", 0), ("a", 0), ("a", 1), ("b", 0), ("b", 0)],
        "is_last_step": [False, True, True, False, True],
        "env_metrics": [{}] * 5,
        "trajectory_generation_times": [1.0] * 5,
        "trajectory_time_splits": {"llm": [0.5] * 5, "env": [0.25] * 5},
    }


def default_output():
    return {
        "prompt_token_ids": [[1, 2], [3]],
        "response_ids": [[5], [6, 7]],
        "loss_masks": [[1], [1, 1]],
        "rewards": [1.0, 0.0],
    }


def broken(**changes):
    return {**step_wise_output(), **changes}


def check(output, step_wise=None, num_prompts=3):
    validate_generator_output(output, num_prompts=num_prompts, step_wise=step_wise)


# --- section 2: step-wise validation, each violation has its error, with the row -----------


@pytest.mark.spec("output.parallel-lists")
def test_valid_output_passes():
    check(step_wise_output(), step_wise=True)
    check(step_wise_output())


@pytest.mark.spec("output.step-wise-fields")
@pytest.mark.parametrize("field", ["is_last_step", "trajectory_ids"])
@pytest.mark.parametrize("missing", [True, False])
def test_both_step_wise_fields_are_required(field, missing):
    output = broken(**{field: None})
    if missing:
        del output[field]
    with pytest.raises(ValueError, match=f"{field}: expected it for step-wise"):
        check(output, step_wise=True)


TEXTS = ("stop_reasons", "env_metrics", "trajectory_generation_times", "trajectory_ids")
LISTS = ("prompt_token_ids", "loss_masks", "rewards", "rollout_logprobs", *TEXTS, "is_last_step")
T, F = True, False
ROUTES = [np.zeros((k, 1, 2), np.uint8) for k in (2, 5, 3, 3, 0)]
REFUSED = [
    *({name: step_wise_output()[name][:-1], "said": rf"{name}: expected one .*\(5\), got 4"}
      for name in LISTS),
    {"trajectory_time_splits": {"llm": [1.0] * 5, "env": [1.0]},
     "said": r"trajectory_time_splits\['env'\]: .*\(5\), got 1"},
    {"is_last_step": [F, T, T, F, F], "said": r"is_last_step: expected True in the last row \(4\)"},
    {"is_last_step": [F, T, F, F, T], "said": "is_last_step: expected True in row 2.*got False"},
    {"is_last_step": [T, T, T, F, T], "said": "is_last_step: expected False in row 0.*got True"},
    {"is_last_step": [F, 1, T, F, T], "said": "is_last_step: expected bools, got 1 in row 1"},
    {"trajectory_ids": [("a", 0), ("a", 1), ("a", 0), ("b", 0), ("b", 0)],
     "is_last_step": [T, T, T, F, T],
     "said": "a trajectory next to each other, got .*'a', 0.*again in row 2"},
    {"trajectory_ids": [("a", 0), ("a", 0), ("b", 1), ("a", 1), ("a", 1)],
     "said": "rows of a group next to each other, got 'a' again in row 3"},
    *({"trajectory_ids": [("a", 0), ("a", 0), bad, ("b", 0), ("b", 0)],
       "said": "trajectory_ids: expected .* row 2"} for bad in ("a0", ("a",), ("a", "0"), None)),
    {"rollout_expert_indices": ROUTES, "said": r"rollout_expert_indices: .*\(2\) in row 3, got 3"},
    *({"rewards": rewards, "said": rf"rewards: expected one float per row.*in row {row}"}
      for row, rewards in [(1, [0.0, [0.0, 1.0], 0.0, 0.0, 1.0]),
                           (3, [[0.0], [0.0, 1.0], [0.0, 0.0], 0.0, [1.0]]),
                           (2, [0.0, 1.0, None, 0.0, 1.0]), (3, [0.0, 1.0, 0.0, "1", 1.0])]),
]  # fmt: skip


@pytest.mark.spec(
    "output.equal-lengths",
    "output.time-splits",
    "output.last-row-is-last",
    "output.trajectory-adjacent",
    "output.is-last-step",
    "output.last-step-at-id-change",
    "output.group-adjacent",
    "output.expert-indices",
    "output.reward-kinds",
    "output.trajectory-ids",
)
@pytest.mark.parametrize("changes", REFUSED, ids=lambda changes: changes["said"])
def test_broken_outputs_are_refused_by_field_and_row(changes):
    said = changes["said"]
    with pytest.raises(ValueError, match=said):
        check(broken(**{name: value for name, value in changes.items() if name != "said"}))


@pytest.mark.spec("output.loss-mask-values", "output.token-list-lengths")
@pytest.mark.parametrize("field", ["loss_masks", "rollout_logprobs", "rewards"])
def test_token_lists_must_be_as_long_as_their_response(field):
    output = step_wise_output()
    if field == "rewards":
        output["rewards"] = [[0.0] * len(row) for row in output["response_ids"]]
    output[field] = [list(row) for row in output[field]]
    output[field][2].append(1)
    with pytest.raises(
        ValueError, match=rf"{field}: expected as many .*2 tokens\) in row 2, got 3"
    ):
        check(output)


@pytest.mark.spec("output.numpy-bool")
@pytest.mark.parametrize("form", [np.array, torch.tensor, lambda row: [np.bool_(v) for v in row]])
def test_last_steps_may_be_of_numpy_or_torch(form):
    check(broken(is_last_step=form(step_wise_output()["is_last_step"])))


def test_trajectory_ids_may_be_objects():
    @dataclass
    class OtherId:
        instance_id: str
        repetition_id: int

    ids = [OtherId(*pair) for pair in step_wise_output()["trajectory_ids"]]
    check(broken(trajectory_ids=ids))
    check(broken(trajectory_ids=[TrajectoryID(i.instance_id, i.repetition_id) for i in ids]))


@pytest.mark.spec("output.rollout-logprobs")
def test_empty_response_keeps_its_empty_list():
    output = step_wise_output()
    output["response_ids"][4] = output["loss_masks"][4] = output["rollout_logprobs"][4] = []
    check(output)
    output["rollout_logprobs"][4] = None
    with pytest.raises(ValueError, match=r"rollout_logprobs: expected a list .*row 4 is None"):
        check(output)


@pytest.mark.spec("output.all-masked-warning")
def test_all_zero_masks_are_a_warning(caplog):
    output = broken(loss_masks=[[0] * len(row) for row in step_wise_output()["response_ids"]])
    with caplog.at_level(logging.WARNING):
        check(output)
    assert "all 5 loss masks are 0" in caplog.text


def test_no_rows_and_missing_fields_are_refused():
    with pytest.raises(ValueError, match="response_ids: expected at least one row"):
        check({**default_output(), "response_ids": []})
    with pytest.raises(ValueError, match="rewards: expected it"):
        check({**default_output(), "rewards": None})


# --- section 2: the default path ---------------------------------------------------------------


@pytest.mark.spec("output.row-per-prompt")
@pytest.mark.parametrize("step_wise", [None, False])
def test_default_path_requires_one_row_per_prompt(step_wise):
    check(default_output(), step_wise, num_prompts=2)
    with pytest.raises(ValueError, match=r"one row per prompt \(3\), got 2"):
        check(default_output(), step_wise, num_prompts=3)


@pytest.mark.spec("output.default-path-unchanged")
def test_default_path_does_not_read_trajectory_ids():
    check({**default_output(), "trajectory_ids": [("a", 0), ("a", 0)]}, num_prompts=2)


# --- random outputs: valid ones pass, a change in one place is detected --------------------------


@st.composite
def outputs(draw):
    rows = []
    for group in range(draw(st.integers(1, 4))):
        for repetition in range(draw(st.integers(1, 3))):
            turns = draw(st.integers(1, 4))
            rows += [((f"p{group}", repetition), k + 1 == turns) for k in range(turns)]
    lengths = [draw(st.integers(0, 3)) for _ in rows]
    return {
        "prompt_token_ids": [[1]] * len(rows),
        "response_ids": [[2] * n for n in lengths],
        "loss_masks": [[1] * n for n in lengths],
        "rewards": [0.0] * len(rows),
        "trajectory_ids": [identity for identity, _ in rows],
        "is_last_step": [last for _, last in rows],
    }


@pytest.mark.spec("output.last-step-at-id-change")
@given(outputs(), st.data())
def test_flipping_any_is_last_step_is_detected(output, data):
    check(output)
    row = data.draw(st.integers(0, len(output["is_last_step"]) - 1))
    output["is_last_step"][row] ^= True
    with pytest.raises(ValueError, match=rf"is_last_step: .*row( \(|\s){row}|last row \({row}\)"):
        check(output)


# --- construction --------------------------------------------------------------------------------


def step(response, reward=0.0, stop="stop", logprobs=True, version=0, experts=None):
    return Step(
        prompt_token_ids=[1, 2],
        response_ids=response,
        loss_mask=[1] * len(response),
        rollout_logprobs=[-1.0] * len(response) if logprobs else None,
        reward=reward,
        stop_reason=stop,
        policy_version=version,
        text="",
        observation="",
        llm_seconds=1.0,
        env_seconds=0.5,
        expert_indices=experts,
    )


def trajectory(uid, repetition, steps, stop="done", **changes):
    return Trajectory(
        uid=uid,
        repetition_id=repetition,
        steps=steps,
        stop_reason=stop,
        env_class="env",
        env_metrics={"found": 1.0},
        seconds=4.0,
        **changes,
    )


@pytest.mark.spec("output.row-per-step")
def test_each_step_becomes_a_row():
    output = generator_output_from_trajectories(
        [
            trajectory("a", 0, [step([3]), step([4, 5], reward=1.0, version=2)]),
            trajectory("a", 1, [step([6], reward=-1.0)], stop="length"),
        ]
    )
    assert output["response_ids"] == [[3], [4, 5], [6]]
    assert output["rewards"] == [0.0, 1.0, -1.0]
    assert output["is_last_step"] == [False, True, True]
    assert output["trajectory_ids"] == [("a", 0), ("a", 0), ("a", 1)]
    assert output["policy_versions"] == [0, 2, 0]
    assert output["trajectory_generation_times"] == [4.0] * 3
    assert output["trajectory_time_splits"] == {"llm": [2.0, 2.0, 1.0], "env": [1.0, 1.0, 0.5]}
    check(output, step_wise=True)


@pytest.mark.spec("rollout.reason-on-last-step")
def test_stop_reason_of_a_trajectory_is_on_its_last_row():
    output = generator_output_from_trajectories(
        [trajectory("a", 0, [step([3]), step([4])], stop="length")]
    )
    assert output["stop_reasons"] == ["stop", "length"]


@pytest.mark.spec("rollout.first-prompt-too-long", "rollout.retries")
@pytest.mark.parametrize(
    "empty",
    [
        trajectory("a", 1, [], stop="length"),
        trajectory("a", 1, [step([8], reward=5.0)], stop="error", failure="env raised"),
    ],
)
def test_trajectory_without_result_becomes_an_empty_masked_row(empty):
    output = generator_output_from_trajectories([trajectory("a", 0, [step([3])]), empty])
    assert output["response_ids"] == [[3], []]
    assert output["loss_masks"] == [[1], []]
    assert output["rollout_logprobs"] == [[-1.0], []]
    assert output["rewards"] == [0.0, 0.0]
    assert output["stop_reasons"] == ["done", empty.stop_reason]
    assert len(output["prompt_token_ids"][1]) >= 1
    check(output, step_wise=True)
    metrics = output["rollout_metrics"]
    assert metrics["generate/num_empty_trajectories"] == 1
    assert metrics["generate/num_failed_trajectories"] == (empty.failure is not None)


def test_batch_of_empty_trajectories_only():
    output = generator_output_from_trajectories([trajectory("a", 0, [], stop="length")])
    check(output, step_wise=True)
    assert output["rollout_logprobs"] is None or output["rollout_logprobs"] == [[]]


def test_logprobs_in_some_steps_only_are_refused():
    none = generator_output_from_trajectories([trajectory("a", 0, [step([3], logprobs=False)])])
    assert none["rollout_logprobs"] is None
    with pytest.raises(ValueError, match=r"rollout_logprobs: .* got none in row 1"):
        generator_output_from_trajectories(
            [trajectory("a", 0, [step([3]), step([4], logprobs=False)])]
        )


def test_routes_are_copied_and_missing_ones_are_empty():
    routes = np.ones((3, 2, 2), dtype=np.uint8)
    output = generator_output_from_trajectories(
        [trajectory("a", 0, [step([3], experts=routes), step([4])])]
    )
    assert [r.shape for r in output["rollout_expert_indices"]] == [(3, 2, 2), (0, 2, 2)]


def test_empty_list_of_trajectories_is_refused():
    with pytest.raises(ValueError, match="trajectories: expected at least one"):
        generator_output_from_trajectories([])
