"""The datums of a run in the store that the viewer reads."""

from pathlib import Path

import numpy as np
import pytest
from _tinker import KEY, call_of, make_datum, new_model, running_server, train

from skyrl_fast.cli import main
from skyrl_fast.tinker.recording import DatumRecorder
from skyrl_fast.tinker.wire import Datum, LossOutputs
from skyrl_fast.trajectory_store.parts import parts, read_index_file
from skyrl_fast.trajectory_store.reader import read_trajectories

RUN = "abc:train:0"


def rl_datum(tokens: list[int], prompt: int, advantage: float) -> Datum:
    """Return a datum whose first `prompt` tokens are not trained."""
    length = len(tokens) - 1
    trained = np.arange(length) >= prompt - 1
    return Datum(
        np.array(tokens[:-1], np.int32),
        {
            "target_tokens": np.array(tokens[1:]),
            "advantages": (trained * advantage).astype(np.float32),
            "logprobs": -np.arange(length, dtype=np.float32),
        },
    )


@pytest.mark.spec("tinker.record")
def test_the_datums_of_a_step_are_its_trajectories(tiny_model_folder: Path, tmp_path: Path) -> None:
    recorder = DatumRecorder(tmp_path, str(tiny_model_folder))
    datums = [
        rl_datum([65, 66, 67, 68], 2, 0.5),
        rl_datum([70, 71, 72], 2, 1.0),
        rl_datum([65, 66, 69, 70, 71], 2, -0.5),
    ]
    outputs = LossOutputs([np.full(len(one.tokens), -2.5, np.float32) for one in datums])
    for part in ([0, 1], [2]):  # two calls of one step
        call = call_of([datums[place] for place in part], "ppo")
        recorder.add(RUN, call, LossOutputs([outputs.logprobs[place] for place in part]))
        recorder.add(RUN, call_of(datums, "ppo", forward_only=True), outputs)
    recorder.step(RUN, 1)
    recorder.step(RUN, 2)  # of nothing
    recorder.close()
    stored = list(read_trajectories(tmp_path / RUN))
    assert {one.entry.step for one in stored} == {1}
    by_prompt: dict[str, list[list[int]]] = {}
    for one in stored:
        (step,) = one.steps
        by_prompt.setdefault(one.entry.uid, []).append(list(step.response_ids))
        assert len(step.prompt_token_ids) == 2 and step.loss_mask.all()
        assert set(step.trainer_logprobs) == {-2.5}
        assert step.rollout_logprobs.tolist() == [-1.0, -2.0, -3.0][: len(step.response_ids)]
    assert sorted(by_prompt.values()) == [[[67, 68], [69, 70, 71]], [[72]]]
    advantages = {float(one.steps[0].advantages[0]) for one in stored}
    assert advantages == {0.5, 1.0, -0.5}
    assert main(["view", str(tmp_path / RUN)]) == 0
    assert (tmp_path / RUN / "view" / "index.html").is_file()


def test_weights_and_several_targets_are_shown(tiny_model_folder: Path, tmp_path: Path) -> None:
    recorder = DatumRecorder(tmp_path, str(tiny_model_folder))
    random = np.random.default_rng(0)
    datums = [make_datum(random, 5, width=3), make_datum(random, 4)]
    shapes = [one.inputs["target_tokens"].shape for one in datums]
    outputs = LossOutputs([np.zeros(shape, np.float32) for shape in shapes])
    recorder.add(RUN, call_of(datums), outputs)
    recorder.step(RUN, 7)
    recorder.close()
    stored = {len(one.steps[0].response_ids): one for one in read_trajectories(tmp_path / RUN)}
    assert sorted(stored) == [4, 5]
    expected = datums[0].inputs
    assert stored[5].steps[0].response_ids == expected["target_tokens"][:, 0].tolist()
    np.testing.assert_allclose(
        stored[5].steps[0].advantages,
        expected["weights"][:, 0],
        atol=1e-3,  # decimals that are stored
    )
    assert stored[5].entry.step == 7


def test_a_full_disk_costs_the_record_and_not_the_run(
    tiny_model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / RUN).write_text("a file where the folder would be")
    recorder = DatumRecorder(tmp_path, str(tiny_model_folder))
    datum = rl_datum([1, 2, 3], 1, 1.0)
    for step in (1, 2):
        recorder.add(RUN, call_of([datum], "ppo"), LossOutputs([np.zeros(2, np.float32)]))
        recorder.step(RUN, step)
    recorder.close()
    warnings = [one for one in caplog.messages if "are not recorded" in one]
    assert len(warnings) == 1


def record_steps(recorder: DatumRecorder, steps: range) -> None:
    datum = rl_datum([1, 2, 3], 1, 1.0)
    for step in steps:
        recorder.add(RUN, call_of([datum], "ppo"), LossOutputs([np.zeros(2, np.float32)]))
        recorder.step(RUN, step)
    recorder.close()


@pytest.mark.spec("tinker.record-size")
def test_a_full_record_keeps_its_newest_steps(
    tiny_model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / RUN / "trajectories"
    record_steps(DatumRecorder(tmp_path, str(tiny_model_folder)), range(1, 4))
    of_a_step = (folder / "step_000001.jsonl").stat().st_size
    limit = 20 * of_a_step + of_a_step // 2
    # Started again, with three steps of before.
    record_steps(DatumRecorder(tmp_path, str(tiny_model_folder), max_bytes=limit), range(4, 101))
    sizes = {part.step: part.path.stat().st_size for part in parts(folder)}
    assert sum(sizes.values()) <= limit
    assert list(sizes) == list(range(101 - len(sizes), 101)) and len(sizes) >= 18
    assert set(read_index_file(folder)) == {part.path.name for part in parts(folder)}
    index_lines = (folder / "index.jsonl").read_text().splitlines()
    assert len(index_lines) <= 21
    assert {one.entry.step for one in read_trajectories(tmp_path / RUN)} == set(sizes)
    assert len([one for one in caplog.messages if "oldest steps are removed" in one]) == 1


def test_a_step_larger_than_the_record_is_kept_alone(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    record_steps(DatumRecorder(tmp_path, str(tiny_model_folder), max_bytes=100), range(1, 4))
    assert [part.step for part in parts(tmp_path / RUN / "trajectories")] == [3]


def test_gradients_without_a_step_are_bounded(tiny_model_folder: Path, tmp_path: Path) -> None:
    """A program that never steps does not fill the memory: the newest datums are recorded."""
    recorder = DatumRecorder(tmp_path, str(tiny_model_folder), max_bytes=1_000)
    datum = rl_datum([1, 2, 3], 1, 1.0)
    outputs = LossOutputs([np.zeros(2, np.float32)])
    of_a_datum = sum(one.nbytes for one in (datum.tokens, *datum.inputs.values())) + 8
    for _ in range(1_000):
        recorder.add(RUN, call_of([datum], "ppo"), outputs)
    recorder.step(RUN, 1)
    recorder.close()
    stored = [path.read_text() for path in (tmp_path / RUN / "trajectories").glob("step_*")]
    assert len(stored[0].splitlines()) == 1_000 // of_a_datum


def test_a_step_of_equal_rewards_is_recorded_without_a_warning(
    tiny_model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = DatumRecorder(tmp_path, str(tiny_model_folder))
    datum = rl_datum([65, 66, 67], 2, 0.0)
    recorder.add(RUN, call_of([datum], "ppo"), LossOutputs([np.zeros(2, np.float32)]))
    recorder.step(RUN, 1)
    recorder.close()
    [stored] = read_trajectories(tmp_path / RUN)
    assert stored.steps[0].advantages.tolist() == [0.0, 0.0]
    assert stored.steps[0].loss_mask.all()
    assert not caplog.messages


def test_a_server_records_each_step(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tinker = pytest.importorskip("tinker", reason="the Tinker SDK is not installed")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with running_server(tiny_model_folder, tmp_path) as server:
        client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        model = new_model(client, tiny_model_folder)
        values = train(model, 2, 1, 2, 3, 4)
        client.close("success").result(60)
    stored = read_trajectories(tmp_path / "runs" / model.model_id)
    steps = {one.entry.step: one.steps[0] for one in stored}
    assert sorted(steps) == [1, 2]
    assert steps[2].response_ids == [2, 3, 4]
    np.testing.assert_allclose(steps[2].trainer_logprobs, values, atol=1e-3)


def test_an_unloaded_model_leaves_nothing_behind(tiny_model_folder: Path, tmp_path: Path) -> None:
    recorder = DatumRecorder(tmp_path, str(tiny_model_folder))
    datum = rl_datum([1, 2, 3], 1, 1.0)
    recorder.add(RUN, call_of([datum], "ppo"), LossOutputs([np.zeros(2, np.float32)]))
    recorder.forget(RUN)
    recorder.step(RUN, 1)
    recorder.close()
    assert not (tmp_path / RUN).exists()
