"""The trajectory store: contents of a line, recovery after a crash, other readers."""

import errno
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _stored import END, WordTokenizer, batch_of, make_step, make_trajectory, two_turns
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.trajectory_store import read_index, read_trajectories
from skyrl_fast.trajectory_store.lines import encode_line, json_value
from skyrl_fast.trajectory_store.recorded import read_recorded
from skyrl_fast.trajectory_store.token_text import TokenText
from skyrl_fast.trajectory_store.trained import TrainedRows, collect_trained_steps
from skyrl_fast.trajectory_store.writer import StoreError, TrajectoryWriter

LONE = "\udc80"
HOSTILE = "</script><script>\u2028\u2029\u0085\x00\x1b[31m\u202eabc\u2066 " + LONE + "é 日本 🙂"


def writer(run: Path, *, last_step: int = 0) -> TrajectoryWriter:
    return TrajectoryWriter(run / "trajectories", WordTokenizer(), last_step=last_step)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def stored(run: Path, **how: Any) -> list[tuple[str, int, int]]:
    return [
        (t.entry.uid, t.entry.repetition_id, t.entry.step) for t in read_trajectories(run, **how)
    ]


# --- a line -------------------------------------------------------------------------------------


@pytest.mark.spec(
    "store.parts", "store.line-keys", "store.turn-keys", "store.token-keys", "store.eval-mask"
)
def test_line_contains_all_values(tmp_path: Path) -> None:
    group = [two_turns("q", 0, 1.0, env_metrics={"hits": 3}), two_turns("q", 1, 0.0)]
    batch = batch_of(group)
    logprobs = torch.full_like(batch.rewards, float("nan"))
    logprobs[:2] = torch.tensor([-0.5, -0.75])
    path = writer(tmp_path).write(3, "train", group, trained=[TrainedRows(group, batch, logprobs)])
    assert path == tmp_path / "trajectories/step_000003.jsonl"
    record, other = lines(path)
    assert (record["phase"], record["step"], record["uid"], record["repetition_id"]) == (
        ("train", 3, "q", 0)
    )
    assert (record["reward"], record["advantage"], record["stop_reason"]) == (1.0, 1.0, "stop")
    assert (record["failure"], record["filtered"], record["env_metrics"]) == (
        "",
        False,
        {"hits": 3},
    )
    assert (record["policy_version"], record["staleness"], record["seconds"]) == (0, 2, 1.5)
    assert other["advantage"] == 2.0
    first, second = record["turns"]
    assert first["context"] == "w10 w11" and first["response"] == "w20 w21 w1"
    assert first["observation"] == "look" and second["context"] == "w30"
    assert [turn["trained_tokens"] for turn in record["turns"]] == [2, 1]
    assert (first["llm_seconds"], first["env_seconds"]) == (0.5, 0.25)
    first, second = record["tokens"]
    assert first["prompt_shared"] == 0 and first["prompt_token_ids"] == [10, 11]
    assert first["response_ids"] == [20, 21, END] and first["response_ends"] == [3, 7, 10]
    assert first["loss_mask"] == [1, 1, 0] and first["advantages"] == [1.0, 1.0, 1.0]
    assert first["rollout_logprobs"] == [-0.25, -0.5, -0.75]
    assert first["trainer_logprobs"] == [-0.5, -0.75, None]
    assert second["trainer_logprobs"] == []
    assert first["policy_versions"] == []  # all of the turn's policy_version
    assert second["prompt_shared"] == 5 and second["prompt_token_ids"] == [30]


@pytest.mark.spec("store.readable-lines")
def test_text_comes_before_tokens(tmp_path: Path) -> None:
    path = writer(tmp_path).write(1, "eval", [two_turns("q", 0, 1.0)])
    line = path.read_text()
    assert line.index('"turns"') < line.index('"response":"w22') < line.index('"tokens"')
    assert line.index('"response_ids"') > line.index('"tokens"')


@pytest.mark.spec("store.eval-mask")
def test_evaluation_mask_marks_sampled_tokens(tmp_path: Path) -> None:
    path = writer(tmp_path).write(1, "eval", [two_turns("q", 0, 1.0)])
    (record,) = lines(path)
    assert path.name == "eval_step_000001.jsonl"
    assert record["advantage"] is None and record["staleness"] is None
    assert record["tokens"][0]["loss_mask"] == [1, 1, 0]
    assert record["turns"][0]["trained_tokens"] == 0


@pytest.mark.spec("store.failed-trajectories")
def test_failed_and_empty_trajectories_have_lines(tmp_path: Path) -> None:
    failed = two_turns("q", 1, 0.0, failure="the database is gone", stop_reason="env_error")
    empty = make_trajectory("q", 2, [], stop_reason="length")
    group = [two_turns("q", 0, 1.0), failed, empty]
    path = writer(tmp_path).write(1, "train", group, trained=[TrainedRows(group, batch_of(group))])
    good, second, third = lines(path)
    assert good["turns"][0]["trained_tokens"] == 2
    assert second["failure"] == "the database is gone" and len(second["turns"]) == 2
    assert [turn["trained_tokens"] for turn in second["turns"]] == [0, 0]
    assert third["turns"] == [] and third["stop_reason"] == "length"
    assert [len(t.steps) for t in read_trajectories(tmp_path)] == [2, 2, 0]


@pytest.mark.spec("store.failed-trajectories")
def test_a_failure_keeps_the_calls_that_ended_in_it(tmp_path: Path) -> None:
    trace = '  File "guess.py", line 7, in step\n    return 1 / 0\n'
    failed = make_trajectory("q", 0, [], failure="step raised", failure_trace=trace)
    other = make_trajectory("q", 1, [], failure="the engine is gone")
    path = writer(tmp_path).write(1, "eval", [failed, other])
    assert "failure_trace" not in lines(path)[1]  # as in files without the key
    assert [t.failure_trace for t in read_trajectories(tmp_path)] == [trace, ""]
    assert [t.failure_trace for t in read_recorded(tmp_path, phase="eval")] == [trace, ""]


@pytest.mark.spec("store.trained-values")
def test_mask_is_the_one_after_filters(tmp_path: Path) -> None:
    group = [two_turns("q", 0, 1.0)]
    batch = batch_of(group)
    batch = batch.with_(loss_mask=torch.zeros_like(batch.loss_mask))
    (record,) = lines(
        writer(tmp_path).write(1, "train", group, trained=[TrainedRows(group, batch)])
    )
    assert record["filtered"] is True
    assert record["tokens"][0]["loss_mask"] == [0, 0, 0]


# --- merged rows --------------------------------------------------------------------------------


def test_merged_rows_are_split_into_steps() -> None:
    group = [two_turns("q", 0, 1.0), two_turns("q", 1, 0.0)]
    batch = batch_of(group, merged="fork")
    assert batch.num_rows == 2
    logprobs = -torch.arange(batch.rewards.shape[0], dtype=torch.float32)
    first, second = collect_trained_steps(group, batch, logprobs)
    # A merged row is: response (3), observation (1), response (2).
    assert [step.trainer_logprobs.tolist() for step in first] == [[0, -1, -2], [-4, -5]]
    assert [step.trainer_logprobs.tolist() for step in second] == [[-6, -7, -8], [-10, -11]]
    assert [step.loss_mask.tolist() for step in second] == [[1, 1, 0], [1, 0]]


def test_steps_are_found_in_rows_split_by_a_rewritten_context() -> None:
    steps = [
        make_step([10], [20]),
        make_step([10, 20, 30], [21]),  # extends the context
        make_step([11], [22]),  # new context
        make_step([11, 22, 31], [23]),  # extends the context
    ]
    group = [make_trajectory("q", 0, steps), make_trajectory("r", 0, [make_step([12], [24])])]
    batch = batch_of(group, merged="fork")
    assert batch.num_rows == 3
    logprobs = -torch.arange(batch.rewards.shape[0], dtype=torch.float32)
    first, second = collect_trained_steps(group, batch, logprobs)
    assert [step.trainer_logprobs.tolist() for step in first] == [[0], [-2], [-3], [-5]]
    assert second[0].trainer_logprobs.tolist() == [-6]


def test_drifted_token_has_no_values() -> None:
    steps = [
        make_step([10], [20, 21]),
        make_step([10, 20, 25, 30], [22]),  # 21 came back as 25
    ]
    group = [make_trajectory("q", 0, steps)]
    batch = batch_of(group, merged="realign")
    assert batch.num_rows == 1
    ((first, second),) = collect_trained_steps(group, batch)
    assert first.loss_mask.tolist() == [1, 0]
    assert first.advantages[0] == 1.0 and math.isnan(first.advantages[1])
    assert second.loss_mask.tolist() == [1]


def test_batch_of_other_trajectories_is_refused() -> None:
    group = [two_turns("q", 0, 1.0), two_turns("q", 1, 0.0)]
    with pytest.raises(
        ValueError, match="collect_trained_steps: batch must have the 1 trajectories"
    ):
        collect_trained_steps(group[:1], batch_of(group))


# --- text ---------------------------------------------------------------------------------------


class BytesTokenizer:
    """One token per UTF-8 byte, the worst case of byte-level tokenizers."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


@pytest.mark.spec("store.token-keys")
def test_character_of_several_tokens_belongs_to_the_last() -> None:
    text = "a日b🙂"
    words, ends = TokenText(BytesTokenizer()).decode_with_ends(list(text.encode()))
    assert words == text
    assert ends == [1, 1, 1, 2, 3, 3, 3, 3, 4]


@given(st.text(st.characters(codec="utf-8"), max_size=40), st.integers(0, 3))
def test_ends_increase_up_to_the_text_length(text: str, cut: int) -> None:
    ids = list(text.encode())[: -cut or None]
    words, ends = TokenText(BytesTokenizer()).decode_with_ends(ids)
    assert words == bytes(ids).decode("utf-8", "replace")
    assert len(ends) == len(ids) and ends == sorted(ends)
    assert not ids or ends[-1] == len(words)


def test_ends_refer_to_the_stored_text() -> None:
    words, ends = TokenText(WordTokenizer(["a", LONE, "b"])).decode_with_ends([0, 1, 2])
    assert words == "a \\udc80 b" and ends == [1, 8, 10]


@given(st.lists(st.integers(0, 9), max_size=30))
def test_tokenizer_that_decodes_spaces_between_words(ids: list[int]) -> None:
    words, ends = TokenText(WordTokenizer()).decode_with_ends(ids)
    assert [words[a:b].strip() for a, b in zip([0, *ends], ends, strict=False)] == [
        f"w{i}" for i in ids
    ]


@pytest.mark.spec("store.strict-json", "store.surrogates")
def test_any_text_is_stored_as_one_strict_json_line(tmp_path: Path) -> None:
    step = make_step([10], [20], observation=HOSTILE)
    group = [make_trajectory(HOSTILE, 0, [step], env_metrics={HOSTILE: HOSTILE, "n": 1})]
    path = writer(tmp_path).write(1, "eval", group)
    content = path.read_bytes()
    assert content.count(b"\n") == 1 and len(content.decode("utf-8").splitlines()) == 1
    assert not set("\u2028\u202e\u2066\u0085\x00\x1b") & set(content.decode())
    want = HOSTILE.replace(LONE, "\\udc80")
    (record,) = lines(path)
    assert record["turns"][0]["observation"] == want
    assert record["uid"] == want and record["env_metrics"][want] == want
    assert "日本 🙂" in content.decode()  # readable, not escaped


@pytest.mark.spec("store.strict-json")
def test_unserializable_metrics_are_replaced_by_a_marker(tmp_path: Path) -> None:
    class NoStr:
        def __str__(self) -> str:
            raise RuntimeError("no words")

    circle: dict[str, Any] = {}
    circle["itself"] = circle
    group = [
        make_trajectory("p", number, [make_step([1], [2])], env_metrics=metrics)
        for number, metrics in enumerate([circle, {"who": NoStr()}, {"long": np.longdouble(2)}])
    ]
    assert [
        record["env_metrics"] for record in lines(writer(tmp_path).write(1, "eval", group))
    ] == [{"unreadable": "RecursionError"}, {"unreadable": "RuntimeError"}, {"long": 2.0}]


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
def test_any_value_becomes_strict_json(value: Any) -> None:
    line = encode_line({"value": json_value(value)})

    def no_constant(name: str) -> None:
        raise AssertionError(name)

    json.loads(line.encode("utf-8"), parse_constant=no_constant)
    assert len(line.splitlines()) == 1


def test_numbers_without_json_representation() -> None:
    record = {"nan": float("nan"), "inf": np.float32("-inf"), "big": 2**60, "np": np.int64(3)}
    assert json.loads(encode_line(json_value(record))) == {
        "nan": None,
        "inf": None,
        "big": str(2**60),
        "np": 3,
    }


# --- reading ------------------------------------------------------------------------------------


@pytest.mark.spec("store.reading")
def test_store_round_trip(tmp_path: Path) -> None:
    group = [two_turns("q", 0, 1.0), two_turns("q", 1, 0.0)]
    group[1].steps[0].token_versions = [0, 1, 1]
    store = writer(tmp_path)
    store.write(0, "eval", [two_turns("e", 0, 1.0)])
    store.write(1, "train", group, trained=[TrainedRows(group, batch_of(group))])
    store.write(1, "eval", [two_turns("e", 0, 1.0)])
    assert stored(tmp_path) == [("e", 0, 0), ("q", 0, 1), ("q", 1, 1), ("e", 0, 1)]
    assert stored(tmp_path, phase="train") == [("q", 0, 1), ("q", 1, 1)]
    assert stored(tmp_path, phase="eval", steps=range(1, 2)) == [("e", 0, 1)]
    trajectory = list(read_trajectories(tmp_path, phase="train"))[1]
    for step, want in zip(trajectory.steps, group[1].steps, strict=True):
        assert step.prompt_token_ids == want.prompt_token_ids
        assert step.response_ids == want.response_ids
        assert "".join(step.pieces) == want.text and len(step.pieces) == len(want.response_ids)
        assert step.loss_mask.tolist() == want.loss_mask
        assert step.rollout_logprobs.tolist() == pytest.approx(want.rollout_logprobs)
        assert step.advantages.tolist() == [2.0] * len(want.response_ids)
        assert np.isnan(step.trainer_logprobs).all()
        assert step.policy_versions.tolist() == want.versions


def test_unknown_phase_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="phase: expected 'train' or 'eval', got 'test'"):
        list(read_trajectories(tmp_path, phase="test"))


@pytest.mark.spec("store.index")
def test_index_has_one_entry_per_trajectory(tmp_path: Path) -> None:
    group = [two_turns("q", 0, 1.0), two_turns("q", 1, 0.0)]
    writer(tmp_path).write(1, "train", group, trained=[TrainedRows(group, batch_of(group))])
    first, second = read_index(tmp_path)
    assert (first.uid, first.reward, first.turns, first.tokens, first.trained_tokens) == (
        ("q", 1.0, 2, 5, 3)
    )
    assert second.offset == first.bytes
    index = tmp_path / "trajectories/index.jsonl"
    assert lines(index) == [asdict(first), asdict(second)]


WRONG = [
    *('{"file": [1]}', '{"file": null}', '{"offset": "0"}', '{"bytes": null}', '{"bytes": 1.5}'),
    *('{"reward": "high"}', '{"uid": 7}', '{"turns": []}'),
]


@pytest.mark.parametrize("damage", ["gone", "torn", "stale", "foreign", *WRONG])
@pytest.mark.spec("store.index-mismatch")
def test_index_that_does_not_match_is_ignored(tmp_path: Path, damage: str) -> None:
    group = [two_turns("q", 0, 1.0), two_turns("q", 1, 0.0)]
    store = writer(tmp_path)
    store.write(1, "train", group, trained=[TrainedRows(group, batch_of(group))])
    store.write(2, "train", group, trained=[TrainedRows(group, batch_of(group))])
    want = read_index(tmp_path)
    index = tmp_path / "trajectories/index.jsonl"
    content = index.read_bytes()
    if damage == "gone":
        index.unlink()
    elif damage == "torn":
        index.write_bytes(content[:-7])
    elif damage == "stale":
        index.write_bytes(content[: content.index(b"\n") + 1])
    elif damage == "foreign":
        index.write_bytes(b'{"another": 1}\n' + content)
    else:
        first, *rest = content.splitlines(keepends=True)
        wrong = json.dumps({**json.loads(first), **json.loads(damage)}).encode() + b"\n"
        index.write_bytes(b"".join([wrong, *rest]))
    assert read_index(tmp_path) == want


@pytest.mark.spec("store.cut-line")
def test_truncated_last_line_is_ignored(tmp_path: Path) -> None:
    group = [two_turns("q", 0, 1.0), two_turns("q", 1, 0.0)]
    path = writer(tmp_path).write(1, "train", group, trained=[TrainedRows(group, batch_of(group))])
    content = path.read_bytes()
    for size in (len(content) - 1, len(content) - 40, content.index(b"\n") + 1):
        path.write_bytes(content[:size])
        assert stored(tmp_path) == [("q", 0, 1)]
        assert [entry.repetition_id for entry in read_index(tmp_path)] == [0]


def test_damaged_line_is_reported_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = [two_turns("q", 0, 1.0), two_turns("q", 1, 0.0)]
    path = writer(tmp_path).write(1, "train", group, trained=[TrainedRows(group, batch_of(group))])
    content = bytearray(path.read_bytes())
    content[3:6] = b"\x00\xff{"
    path.write_bytes(content)
    (tmp_path / "trajectories/index.jsonl").unlink()
    assert stored(tmp_path) == [("q", 1, 1)]
    assert "step_000001.jsonl: line at byte 0 skipped" in caplog.text


def test_lines_of_another_format_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "trajectories"
    folder.mkdir()
    (folder / "step_000001.jsonl").write_text('{"uid": "q"}\n')
    with pytest.raises(ValueError, match="expected trajectories of format 1, got None"):
        list(read_trajectories(tmp_path))


# --- resuming -----------------------------------------------------------------------------------


@pytest.mark.spec("store.resume")
def test_resumed_store_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    def write(store: TrajectoryWriter, *steps: int) -> None:
        for step in steps:
            group = [two_turns(f"q{step}", 0, 1.0)]
            store.write(step, "train", group, trained=[TrainedRows(group, batch_of(group))])

    def content(run: Path) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in (run / "trajectories").iterdir()}

    write(writer(tmp_path / "full"), 1, 2, 3)
    write(writer(tmp_path / "broken"), 1, 2, 3)
    folder = tmp_path / "broken/trajectories"
    (folder / ".step_000004.jsonl.partial").write_bytes(b'{"half')
    write(writer(tmp_path / "broken", last_step=1), 2, 3)
    (folder / ".step_000004.jsonl.partial").unlink(missing_ok=True)
    assert content(tmp_path / "broken") == content(tmp_path / "full")
    # Killed between a part and its index lines: the part exists, the index lacks it.
    write(writer(tmp_path / "broken", last_step=3))
    assert stored(tmp_path / "broken") == stored(tmp_path / "full")


def test_rewritten_part_replaces_the_first(tmp_path: Path) -> None:
    store = writer(tmp_path)
    store.write(0, "eval", [two_turns("a", 0, 1.0), two_turns("b", 0, 1.0)])
    store.write(0, "eval", [two_turns("c", 0, 1.0)])
    assert stored(tmp_path) == [("c", 0, 0)]
    assert [entry.uid for entry in read_index(tmp_path)] == ["c"]


@pytest.mark.spec("store.atomic-parts")
def test_failed_write_leaves_no_partial_file(tmp_path: Path) -> None:
    store = writer(tmp_path)

    class Unreadable(dict[str, Any]):
        def items(self) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

    bad: list[Trajectory] = [
        two_turns("a", 0, 1.0),
        two_turns("b", 0, 1.0, env_metrics=Unreadable(x=1)),
    ]
    want = "trajectories of step 1 not written to .*/trajectories: the disk is full; free space"
    with pytest.raises(StoreError, match=want):
        store.write(1, "eval", bad)
    assert [path.name for path in (tmp_path / "trajectories").iterdir()] == ["index.jsonl"]
    assert read_index(tmp_path) == []


# --- other readers ------------------------------------------------------------------------------


def written_run(tmp_path: Path) -> Path:
    store = writer(tmp_path)
    for step in (1, 2):
        group = [two_turns(HOSTILE, 0, 1.0), two_turns(HOSTILE, 1, 0.0)]
        group.append(make_trajectory(HOSTILE, 2, []))
        group[1].steps[0].text = group[1].steps[0].observation = "2020-01-01 00:00:00"
        group[0].env_metrics = {f"only in {step}": step}
        store.write(step, "train", group, trained=[TrainedRows(group, batch_of(group))])
    return tmp_path


@pytest.mark.spec("store.index")
def test_pandas_reads_the_store(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    run = written_run(tmp_path)
    index = pandas.read_json(run / "trajectories/index.jsonl", lines=True)
    assert index.groupby("step").reward.mean().tolist() == pytest.approx([1 / 3, 1 / 3])
    frame = pandas.read_json(run / "trajectories/step_000002.jsonl", lines=True)
    assert frame.turns[0][0]["response"] == "w20 w21 w1"
    assert frame.tokens[0][0]["rollout_logprobs"] == [-0.25, -0.5, -0.75]


def test_datasets_reads_the_store(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the datasets package is not installed")
    run = written_run(tmp_path)
    rows = datasets.load_dataset(
        "json",
        data_files=str(run / "trajectories/step_*.jsonl"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert len(rows) == 6
    assert rows[4]["turns"][0]["observation"].startswith("2020-01-01")
    assert rows[0]["tokens"][0]["rollout_logprobs"] == [-0.25, -0.5, -0.75]


# --- kill -9 ------------------------------------------------------------------------------------

WRITER_SCRIPT = """
import sys
from pathlib import Path
from _stored import WordTokenizer, batch_of, two_turns
from skyrl_fast.trajectory_store.trained import TrainedRows
from skyrl_fast.trajectory_store.writer import TrajectoryWriter

run, last_step = Path(sys.argv[1]), int(sys.argv[2])
store = TrajectoryWriter(run / "trajectories", WordTokenizer(), last_step=last_step)
print("ready", flush=True)
for step in range(last_step + 1, 10_000):
    group = [two_turns(f"q{step}", sample, 1.0) for sample in range(40)]
    store.write(step, "train", group, trained=[TrainedRows(group, batch_of(group))])
"""


@pytest.mark.spec("store.index-mismatch", "store.cut-line", "store.resume", "store.atomic-parts")
def test_store_is_readable_and_resumes_after_kill_at_any_time(tmp_path: Path) -> None:
    here = Path(__file__).parents[1] / "helpers"
    random, last_step = np.random.default_rng(0), 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER_SCRIPT, str(tmp_path), str(last_step)],
            env={**os.environ, "PYTHONPATH": f"{here}:{here.parent}"},
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(random.uniform(0.05, 0.4))
        process.kill()
        process.wait()
        process.stdout.close()
        steps = {entry.step for entry in read_index(tmp_path)}
        newest = max(steps, default=0)
        want = [(f"q{step}", sample, step) for step in range(1, newest + 1) for sample in range(40)]
        assert stored(tmp_path) == want
        assert [(e.uid, e.repetition_id, e.step) for e in read_index(tmp_path)] == want
        last_step = max(0, newest - 1)  # the checkpoint is a step behind
    assert last_step > 0


def test_training_data_of_a_run_are_its_groups_without_evaluations(tmp_path: Path) -> None:
    store = writer(tmp_path)
    for step in (1, 2):
        group = [two_turns("q", sample, 1.0) for sample in range(2)]
        store.write(step, "train", group, trained=[TrainedRows(group, batch_of(group))])
        store.write(step, "eval", [two_turns("held out", 0, 1.0)])
    ids = [(one.uid, one.repetition_id) for one in read_recorded(tmp_path)]
    assert ids == [("q", 0), ("q", 1), ("q~2", 0), ("q~2", 1)]
    assert [one.uid for one in read_recorded(tmp_path, phase="eval")] == ["held out", "held out~2"]


@pytest.mark.spec("store.replay", "gateway.export")
def test_a_training_run_says_what_it_lacks_for_replay(tmp_path: Path) -> None:
    routes = np.ones((4, 1, 2), np.int16)
    kept = [np.array([20, 21], np.int32)] * 2
    steps = [make_step([10, 11], [20, 21], kept_ids=kept, expert_indices=routes)]
    rewards = {"planner": 0.5}
    trajectories = [make_trajectory("a", 0, steps), two_turns("b", 0, 1.0, policy_rewards=rewards)]
    writer = TrajectoryWriter(tmp_path / "trajectories", WordTokenizer(), last_step=0)
    writer.write(
        1, "train", trajectories, trained=[TrainedRows(trajectories, batch_of(trajectories))]
    )
    first, second = read_trajectories(tmp_path)
    assert (list(first.not_stored), list(second.not_stored)) == (["kept_ids", "routes"], [])
    assert (first.steps[0].kept_ids, first.steps[0].routes) == (None, None)
    wanted = r"trajectory 'a' #0 was sampled with kept_ids and routes, without which it cannot be"
    with pytest.raises(ValueError, match=wanted):
        read_recorded(tmp_path)
    (only,) = read_recorded(tmp_path, min_reward=1.0)
    assert only.uid == "b" and only.policy_rewards == rewards
