"""Synthetic trajectories and trained batches, for tests of the store and the viewer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from skyrl_fast.batch import StepBatch, batch_from_trajectories
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.trajectory_store.lines import encode_line
from skyrl_fast.trajectory_store.trained import TrainedRows
from skyrl_fast.trajectory_store.writer import TrajectoryWriter

END = 1  # the end token of WordTokenizer


class WordTokenizer:
    """Each id is a word; words are joined by spaces."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        self.words = list(words)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[i] if i < len(self.words) else f"w{i}" for i in ids)


def make_step(prompt: list[int], response: list[int], **values: Any) -> Step:
    given: dict[str, Any] = {
        "loss_mask": [1] * len(response),
        "rollout_logprobs": [-0.25 * (i + 1) for i in range(len(response))],
        "reward": 0.0,
        "stop_reason": "stop",
        "policy_version": 0,
        "text": " ".join(f"w{i}" for i in response),
        "observation": "",
        "llm_seconds": 0.5,
        "env_seconds": 0.25,
    }
    return Step(prompt_token_ids=prompt, response_ids=response, **{**given, **values})


def make_trajectory(uid: str, repetition_id: int, steps: list[Step], **values: Any) -> Trajectory:
    given: dict[str, Any] = {
        "stop_reason": steps[-1].stop_reason if steps else "length",
        "env_class": "made",
        "env_metrics": {},
        "seconds": 1.5,
    }
    return Trajectory(uid=uid, repetition_id=repetition_id, steps=steps, **{**given, **values})


def two_turns(uid: str, repetition_id: int, reward: float, **values: Any) -> Trajectory:
    """Prompt 10 11, response 20 21 end; observation 30, response 22 end. The ends are appended."""
    steps = [
        make_step([10, 11], [20, 21, END], loss_mask=[1, 1, 0], observation="look"),
        make_step([10, 11, 20, 21, END, 30], [22, END], loss_mask=[1, 0], reward=reward),
    ]
    return make_trajectory(uid, repetition_id, steps, **values)


def batch_of(trajectories: Sequence[Trajectory], *, merged: str | None = None) -> StepBatch:
    """Return the batch with advantage 1 on the tokens of trajectory 0, 2 on those of 1, ..."""
    batch = batch_from_trajectories(trajectories)
    if merged is not None:
        batch = batch.merged(drift=merged)
    number = batch.trajectory_ids + 1
    token_values = torch.repeat_interleave(number, batch.response_lengths.long()).float()
    return batch.with_(advantages=token_values)


@st.composite
def some_trajectories(draw: st.DrawFn) -> list[Trajectory]:
    """Draw groups with inexact float32 rewards, failures, empty responses, routes, sources."""
    with_logprobs, with_routes = draw(st.booleans()), draw(st.booleans())
    trajectories = []
    for group in range(draw(st.integers(1, 3))):
        for repetition in range(draw(st.integers(1, 3))):
            steps = []
            for _ in range(draw(st.integers(0, 3))):
                prompt = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3))
                if steps and draw(st.booleans()):  # a context that only grew
                    prompt = [*steps[-1].prompt_token_ids, *steps[-1].response_ids, *prompt]
                response = draw(st.lists(st.integers(0, 9), max_size=3))
                values: dict[str, Any] = {
                    "loss_mask": [draw(st.integers(0, 1)) for _ in response],
                    "reward": draw(st.sampled_from([0.0, 0.1, -0.7, 1.0])),
                    "policy_version": draw(st.integers(0, 5)),
                    "llm_seconds": draw(st.sampled_from([0.1, 0.7])),
                }
                if not with_logprobs:
                    values["rollout_logprobs"] = None
                if with_routes and draw(st.booleans()):
                    length = draw(st.integers(0, len(prompt) + len(response)))
                    values["expert_indices"] = np.full((length, 2, 1), 300 * length)
                steps.append(make_step(prompt, response, **values))
            trajectories.append(
                make_trajectory(
                    f"p{group}",
                    repetition,
                    steps,
                    stop_reason=draw(st.sampled_from(["stop", "length"])),
                    failure=draw(st.sampled_from([None, None, "broken"])),
                    seconds=draw(st.sampled_from([0.3, 1.5])),
                    env_metrics=draw(st.sampled_from([{}, {"hits": 2, "ok": True, "text": "x"}])),
                    data_source=draw(st.sampled_from([None, "nq", "a/b"])),
                )
            )
    return trajectories


# --- a run with a hostile trajectory among the others ---------------------------------------------

MARKUP = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=2'>"
TURNED = "\u202eevil\u2066 \u200b\u2028\u2029\x1b[31m\x00\x7f\U000e0041 \ud800"
HOSTILE = f"{MARKUP}\"'`${{window.hacked=3}}\\{TURNED} <!-- ]]> javascript:alert(1)"
LONG_LINE = "x" * 30_000
TRACE = '  File "guess.py", line 7, in step\n    return 1 / 0\n'
WORDS = ["", "", "look", "at", "the", "table", ",", "then", "select", "from", "users"]
WORDS += ["<sql>", "</sql>", "\n"]
TOKENS = [*WORDS, HOSTILE, "日", "👩\u200d👩\u200d👧", "\u202e"]
HOSTILE_TOKENS = list(range(len(WORDS), len(TOKENS)))


def write_run(run: Path, *, steps: int = 6, groups: int = 3, samples: int = 4) -> Path:
    """Write a synthetic run with metrics; all text of group 0 of step 1 is hostile."""
    writer = TrajectoryWriter(run / "trajectories", WordTokenizer(TOKENS), last_step=0)
    rows = []
    for step in range(1, steps + 1):
        trajectories = [
            _made(step, group, sample) for group in range(groups) for sample in range(samples)
        ]
        batch = batch_of(trajectories)
        signs = torch.where(batch.trajectory_ids % 2 == 0, 1.0, -0.5)
        batch = batch.with_(
            advantages=torch.repeat_interleave(signs, batch.response_lengths.long())
        )
        assert batch.rollout_logprobs is not None
        shift = torch.linspace(-0.2, 0.2, len(batch.rollout_logprobs))
        seen = batch.rollout_logprobs + shift
        writer.write(step, "train", trajectories, trained=[TrainedRows(trajectories, batch, seen)])
        rows.append(
            {
                "step": step,
                "reward/avg_raw_reward": step / steps,
                "timing/generate": 1.0,
                "timing/forward_backward": 2.0,
                "faults/environments_failed": float(step),
                "faults/engines_restarted": 0.0,
                HOSTILE: 0.5,
            }
        )
    writer.write(steps, "eval", [_made(steps, group, 0) for group in range(1, groups)])
    metrics = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "metrics.jsonl").write_text(metrics)
    config = {"trainer": {"run_name": HOSTILE}}
    (run / "config.json").write_text(json.dumps(config))
    return run


def _made(step: int, group: int, sample: int) -> Trajectory:
    hostile = step == 1 and group == 0
    words = HOSTILE_TOKENS if hostile else [2, 3, 4, 5, 12]
    uid = HOSTILE if hostile else f"prompt {group + 100 * step}"
    age = sample % 3 if step > 2 else 0
    version = step - 1 - age
    turns = [
        make_step(
            [2, 3, *HOSTILE_TOKENS] if hostile else [2, 3],
            [*words, END],
            loss_mask=[1] * len(words) + [0],
            observation=HOSTILE + LONG_LINE if hostile else "id | name\n1 | Ann",
            policy_version=version,
        )
    ]
    if age:  # weights updated while sampling: the rest is from the next policy
        turns[0].token_versions = [version, *[version + 1] * len(words)]
    if sample != 3:  # a second turn; in sample 2 with a rewritten context
        start = [7] if sample == 2 else [*turns[0].prompt_token_ids, *words, END, 8, 9]
        turns.append(make_step(start, [10, 6, 11, END], policy_version=version, reward=1.0))
    values: dict[str, Any] = {"env_metrics": {"rows": 3}}
    if hostile:
        values |= {"env_class": HOSTILE, "data_source": HOSTILE}
        values["env_metrics"] = {"__proto__": HOSTILE, HOSTILE: {"constructor": HOSTILE}}
    if sample == 1:
        values |= {"failure": HOSTILE if hostile else "the database is gone"}
        values |= {"failure_trace": HOSTILE if hostile else TRACE}
        values |= {"stop_reason": HOSTILE if hostile else "env_error"}
    return make_trajectory(uid, sample, turns, **values)


# --- a run whose trajectories are longer than a data file of the page -----------------------------

LONG_MEMBERS = 8
LONG_TURNS = (2, 7000, 0, 1500)  # response tokens


def long_record(repetition: int) -> dict[str, Any]:
    """Return the record of a trajectory with long texts and responses; every value is another."""
    turns, lists = [], []
    for number, count in enumerate(LONG_TURNS):
        pieces = [f" {repetition}<{i}" if i % 3 else '\n"日' for i in range(count)]
        ends = np.cumsum([len(piece) for piece in pieces]).tolist()
        values = [round(-0.001 * i, 6) for i in range(count)]
        turns.append(
            {
                "context": f"context {number} " * (9000 if number == 1 else 1),
                "response": "".join(pieces),
                "observation": "" if number == 2 else f"日 {repetition} " * 9000,
                **{"reward": 1.0, "stop_reason": "stop", "policy_version": 3},
                **{"prompt_tokens": 7, "response_tokens": count, "trained_tokens": count},
                **{"llm_seconds": 1.0, "env_seconds": 0.5},
            }
        )
        lists.append(
            {
                **{"prompt_shared": 0, "prompt_token_ids": [1] * 7, "response_ends": ends},
                "response_ids": list(range(count)),
                "loss_mask": [i % 2 for i in range(count)],
                "policy_versions": [3 + i % 2 for i in range(count)],
                **{"rollout_logprobs": values, "trainer_logprobs": [None] * count},
                "advantages": [],
            }
        )
    return {
        **{"format": 1, "phase": "train", "step": 1, "uid": "a", "repetition_id": repetition},
        **{"env_class": "long", "data_source": "", "reward": 1.0, "advantage": None},
        **{"stop_reason": "stop", "failure": "", "filtered": False, "policy_version": 3},
        **{"staleness": 0, "seconds": 2.0, "turns": turns, "tokens": lists},
        "env_metrics": {f"metric {i}": "m" * 5000 for i in range(100)},
    }


def write_long_run(run: Path) -> Path:
    """Write one group of LONG_MEMBERS long trajectories."""
    (run / "trajectories").mkdir()
    with (run / "trajectories/step_000001.jsonl").open("w") as file:
        for repetition in range(LONG_MEMBERS):
            file.write(encode_line(long_record(repetition)))
    return run
