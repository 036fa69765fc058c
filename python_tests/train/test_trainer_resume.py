"""Runs that stop (by a signal, an error, a kill) and resume from their newest checkpoint."""

import asyncio
import logging
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from _fakes import FakeRollouts, tiny_model, write_prompts
from _training import (
    RESUME,
    Recorder,
    assert_same_files,
    dies_at,
    dying,
    fill,
    settings,
    steady,
    train,
)
from _training import folder as folder  # a fixture

import skyrl_fast
from skyrl_fast.config import Config, to_dict
from skyrl_fast.config.loading import as_config
from skyrl_fast.rollout.engine.protocol import EngineStoppedError
from skyrl_fast.train.checkpoint.local import RunInUseError, checkpoints
from skyrl_fast.train.checkpoint.resumed_settings import (
    find_changed_settings,
    warn_of_changed_settings,
)
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.run import RunParts, RunRequest, run_request
from skyrl_fast.train.setup.errors import SetupError
from skyrl_fast.train.setup.given_objects import GivenObjects
from skyrl_fast.trajectory_store import read_index

pytestmark = pytest.mark.ci


@pytest.mark.parametrize("at_step", [3, 5])
def test_resumed_run_equals_an_uninterrupted_one(folder: Path, at_step: int) -> None:
    complete, first, second = Recorder(), Recorder(dies_at(at_step)), Recorder()
    expected = train(settings(folder, "expected"), complete)
    with dying():
        train(settings(folder, "broken"), first)
    saved = [step for step, _ in checkpoints(folder / "broken/checkpoints")]
    assert saved == [*range(2, at_step + 1, 2)]
    outcome = train(settings(folder, "broken", RESUME), second)
    assert steady(outcome.metrics) == steady(expected.metrics)
    assert first.order[: saved[-1]] + second.order == complete.order
    assert_same_files(outcome, expected, "policy/model.safetensors", "optimizer.safetensors")


def test_an_error_leaves_a_checkpoint_of_the_last_complete_step(folder: Path) -> None:
    async def fail(step: int) -> None:
        if step == 3:
            raise RuntimeError("the environment is gone")

    with pytest.raises(RuntimeError, match="the environment is gone"):
        train(settings(folder, "run"), Recorder(fail))
    assert checkpoints(folder / "run/checkpoints")[-1][0] == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_with_a_checkpoint_and_the_run_resumes(
    folder: Path, number: signal.Signals
) -> None:
    expected = train(settings(folder, "expected"))

    cancelled = False

    async def interrupt(step: int) -> None:
        nonlocal cancelled
        if step == 3:
            os.kill(os.getpid(), number)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled = True
                raise

    recorder = Recorder(interrupt)
    outcome = train(settings(folder, "run"), recorder)
    assert cancelled
    assert (outcome.step, outcome.signal) == (3, number)
    assert outcome.checkpoint is not None and outcome.checkpoint.name == "step_000003"
    assert recorder.rollouts[0].closed
    resumed = train(settings(folder, "run", "trainer.resume_mode=latest"))
    assert (resumed.step, resumed.signal) == (6, None)
    assert steady(resumed.metrics) == steady(expected.metrics)


@pytest.mark.spec("run.engines-of-a-stop")
def test_a_signal_that_ends_the_engine_too_stops_with_a_checkpoint_and_the_run_resumes(
    folder: Path,
) -> None:
    expected = train(settings(folder, "expected"))

    class Ends(FakeRollouts):
        """Ends with the trainer's signal, which comes while the trainer computes."""

        async def update_weights(self, policy: Policy, *, version: int) -> dict[str, float]:
            if version == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.1)
                raise EngineStoppedError("the engines have ended with the run")
            return await super().update_weights(policy, version=version)

    async def make(config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        return Ends(config, tiny_model(seed=1))

    outcome = train(settings(folder, "run"), make)
    assert (outcome.step, outcome.signal) == (3, signal.SIGTERM)
    assert outcome.checkpoint is not None and outcome.checkpoint.name == "step_000003"
    resumed = train(settings(folder, "run", "trainer.resume_mode=latest"))
    assert resumed.step == 6
    assert steady(resumed.metrics) == steady(expected.metrics)


def test_resume_before_the_first_checkpoint_starts_over(folder: Path) -> None:
    expected = train(settings(folder, "run"))
    kept = steady(expected.metrics)
    shutil.rmtree(folder / "run/checkpoints")
    outcome = train(settings(folder, "run", "trainer.resume_mode=latest"))
    assert steady(outcome.metrics) == kept


def test_event_loop_runs_while_a_checkpoint_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    alive: list[bool] = []

    async def note(step: int) -> None:
        loops.append(asyncio.get_running_loop())

    def save(policy: Policy, *arguments: Any) -> None:
        answered = threading.Event()
        loops[0].call_soon_threadsafe(answered.set)
        alive.append(answered.wait(timeout=5))  # trajectories have deadlines
        write(policy, *arguments)

    write = Policy.save
    monkeypatch.setattr(Policy, "save", save)
    train(settings(folder, "run", "trainer.max_training_steps=2"), Recorder(note))
    assert alive == [True]


def test_used_folder_is_not_overwritten(folder: Path) -> None:
    train(settings(folder, "run", "trainer.epochs=1"))
    with pytest.raises(RunInUseError, match="holds an earlier run: --resume"):
        train(settings(folder, "run", "trainer.epochs=1"))


def test_folder_with_trajectories_only_counts_as_used(folder: Path) -> None:
    unseen = ["trainer.logger=[]", "data.val_data=[]"]
    with dying():
        train(settings(folder, "run", *unseen), Recorder(dies_at(1)))
    (part,) = (folder / "run/trajectories").glob("step_*.jsonl")
    kept = part.read_bytes()
    with pytest.raises(RunInUseError, match="holds an earlier run: --resume"):
        train(settings(folder, "run", *unseen))
    assert part.read_bytes() == kept


def test_home_is_expanded_in_run_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    config = settings(
        folder, "x", "trainer.epochs=1", "trainer.run_path=~/runs/a", "trainer.ckpt_path=~/kept"
    )
    outcome = train(config)
    assert (outcome.run_path, outcome.checkpoint) == (
        folder / "runs/a",
        folder / "kept/step_000002",
    )


@pytest.mark.spec("run.absolute-paths")
def test_environment_that_changes_the_current_folder_moves_no_output(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder)

    async def leave(step: int) -> None:
        if step == 2:
            os.chdir(folder / "elsewhere")

    relative = ("trainer.run_path=runs/a", "trainer.ckpt_path=kept")
    paths = ("data.val_data=[val.jsonl]", "trainer.policy.model.path=model")
    outcome = train(settings(folder, "x", *relative, *paths), Recorder(leave))
    assert list((folder / "elsewhere").iterdir()) == []
    assert [step for step, _ in checkpoints(folder / "kept")] == [2, 4, 6]
    assert outcome.run_path == folder / "runs/a"
    assert outcome.checkpoint == folder / "kept/step_000006"
    assert len(read_metrics(folder / "runs/a/metrics.jsonl")) == 7


def test_loss_in_a_relative_file_is_that_of_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "loss.py").write_text("def zero(inputs, **_):\n    return inputs.logprobs * 0.0\n")
    monkeypatch.chdir(folder)

    async def leave(step: int) -> None:
        os.chdir("/")

    loss = "trainer.algorithm.policy_loss_type=loss.py:zero"
    outcome = train(settings(folder, "a", loss), Recorder(leave))
    assert len(read_metrics(outcome.run_path / "metrics.jsonl")) == 7


@pytest.mark.spec("run.locks")
def test_checkpoint_folder_of_another_run_is_refused(folder: Path) -> None:
    shared = f"trainer.ckpt_path={folder}/kept"
    seen: list[str] = []

    def second() -> None:
        try:
            train(settings(folder, "b", shared))
        except RunInUseError as error:
            seen.append(str(error))

    async def during(step: int) -> None:
        if step == 1:
            await asyncio.to_thread(second)

    train(settings(folder, "a", shared), Recorder(during))
    assert [text.split(" in use ")[0] for text in seen] == [f"checkpoint folder {folder}/kept is"]
    assert [step for step, _ in checkpoints(folder / "kept")] == [2, 4, 6]


def test_failed_engine_start_leaves_the_folder_unused(folder: Path) -> None:
    async def broken(*_: object) -> FakeRollouts:
        raise ValueError("no engine today")

    with pytest.raises(SetupError, match="no engine today"):
        skyrl_fast.train_agent(settings(folder, "run", "trainer.epochs=1"), make_rollouts=broken)
    assert train(settings(folder, "run", "trainer.epochs=1")).step == 2


def test_resuming_with_other_data_is_refused(folder: Path) -> None:
    train(settings(folder, "run", "trainer.epochs=1"))
    write_prompts(folder / "train.jsonl", 12)
    with pytest.raises(SetupError, match="num_prompts=8, this run has 12"):
        train(settings(folder, "run", "trainer.resume_mode=latest"))


@pytest.mark.spec("run.same-prompts")
def test_resuming_with_other_prompts_of_the_same_number_is_refused(folder: Path) -> None:
    train(settings(folder, "run", "trainer.epochs=1"))
    path = folder / "train.jsonl"
    first, second, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([second, first, *rest]))
    longer = settings(folder, "run", "trainer.resume_mode=latest", "trainer.epochs=2")
    with pytest.raises(SetupError, match=r"made with 8 other prompts: .* \(digest \w+, now \w+\)"):
        train(longer)
    path.write_text("".join([first, second, *rest]))
    assert train(longer).step == 4


@pytest.mark.spec("run.same-schedule")
def test_other_length_under_a_schedule_is_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cosine = "trainer.policy.optimizer_config.scheduler=cosine"
    again = ("trainer.resume_mode=latest", cosine)
    train(settings(folder, "run", "trainer.epochs=1", cosine))
    train(settings(folder, "run", "trainer.epochs=1", *again))
    assert "schedule" not in caplog.text
    train(settings(folder, "run", "trainer.epochs=2", *again))
    assert "had 2 steps and now has 4: the cosine schedule" in caplog.text


@pytest.mark.parametrize(
    ("where", "version"),
    [
        ("stopped in eval", 0),
        pytest.param("stopped in train", 0, marks=pytest.mark.slow),
        ("stopped in eval", 4),  # the last one
        ("failed in eval", 2),
        ("failed in sync", 3),
    ],
)
@pytest.mark.spec("metrics.reported-once", "store.write-error")
def test_step_interrupted_after_its_update_is_evaluated_and_reported_once(
    folder: Path, where: str, version: int
) -> None:
    expected = train(settings(folder, "expected", "trainer.epochs=2"))
    how, _, phase_of_end = where.partition(" in ")
    ends = [how]

    class Ends(FakeRollouts):
        async def before_batch(self, step: int, phase: str) -> None:
            if phase == phase_of_end and self.version == version and ends:
                if ends.pop() == "failed":
                    raise RuntimeError("the engine is gone")
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(60)  # cancelled by the stop

        async def update_weights(self, policy: Policy, *, version: int) -> dict[str, float]:
            if phase_of_end == "sync" and version == 3 and ends:
                ends.pop()
                raise RuntimeError("the engine is gone")
            return await super().update_weights(policy, version=version)

    async def make(config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        return Ends(config, tiny_model(seed=1))

    if how == "failed":
        with pytest.raises(RuntimeError, match="the engine is gone"):
            skyrl_fast.train_agent(settings(folder, "run", "trainer.epochs=2"), make_rollouts=make)
    else:
        assert (
            skyrl_fast.train_agent(
                settings(folder, "run", "trainer.epochs=2"), make_rollouts=make
            ).step
            == version
        )
    assert checkpoints(folder / "run/checkpoints")[-1][0] == version
    going_on = settings(folder, "run", "trainer.epochs=2", "trainer.resume_mode=latest")
    resumed = skyrl_fast.train_agent(going_on, make_rollouts=make)
    assert not ends
    assert steady(resumed.metrics) == steady(expected.metrics)
    assert (resumed.before, resumed.after) == (expected.before, expected.after)
    stored = [
        [(e.phase, e.step, e.uid, e.repetition_id, e.reward) for e in read_index(folder / run)]
        for run in ("run", "expected")
    ]
    assert stored[0] == stored[1]
    # The checkpoint records that it was reported: resuming again repeats nothing.
    again = train(going_on)
    assert steady(again.metrics) == steady(expected.metrics)


def test_evaluation_time_is_not_part_of_the_step_time(folder: Path) -> None:
    now = [0.0]

    class Slow(FakeRollouts):
        async def before_batch(self, step: int, phase: str) -> None:
            now[0] += 1000.0 if phase == "eval" else 10.0

    async def make(config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        return Slow(config, tiny_model(seed=1))

    request = RunRequest(make_rollouts=make, parts=RunParts(clock=lambda: now[0]))
    config = settings(folder, "run", "trainer.epochs=1")
    outcome = run_request(config, GivenObjects("train_agent"), request)
    row = read_metrics(outcome.metrics)[2]
    assert (row["timing/step"], row["timing/eval"]) == (10.0, 1000.0)
    assert (
        row["timing/tokens_per_second"] == 4 * 4 * 2 * 2 / 10.0
    )  # prompts, samples, turns, tokens
    assert row["timing/trained_tokens_per_second"] == row["timing/tokens_per_second"]


@pytest.mark.spec("async.resume-path")
def test_resume_from_a_path_sets_later_checkpoints_aside(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    expected = steady(train(settings(folder, "run")).metrics)
    kept = folder / "run/checkpoints"
    weights = {p.name: (p / "policy/model.safetensors").read_bytes() for p in kept.glob("step_*")}
    again = settings(
        folder, "run", "trainer.resume_mode=from_path", f"trainer.resume_path={kept}/step_000002"
    )
    capsys.readouterr()
    assert steady(train(again).metrics) == expected
    shown = capsys.readouterr().err
    assert sorted(path.name for path in kept.glob("step_*")) == [
        "step_000002",
        "step_000004",
        "step_000004.later",
        "step_000006",
        "step_000006.later",
    ]
    for name in ("step_000004", "step_000006"):
        aside = kept / f"{name}.later"
        assert (aside / "policy/model.safetensors").read_bytes() == weights[name]
        note = f"{name} was renamed to {aside}: it is later than trainer.resume_path={kept}/step_"
        assert note in shown
        assert note in caplog.text
    (kept / "step_000002").rename(folder / "the one")  # a checkpoint's name does not matter
    again.trainer.resume_path = str(folder / "the one")
    assert steady(train(again).metrics) == expected
    assert (kept / "step_000006.later-2").is_dir()


@pytest.mark.spec("async.resume-path")
def test_set_aside_checkpoint_can_be_chosen_again(folder: Path) -> None:
    expected = steady(train(settings(folder, "run")).metrics)
    kept = folder / "run/checkpoints"
    (kept / "step_000006").rename(kept / "step_000006.later")
    again = settings(
        folder,
        "run",
        "trainer.resume_mode=from_path",
        f"trainer.resume_path={kept}/step_000006.later",
    )
    assert train(again).step == 6
    assert steady(folder / "run/metrics.jsonl") == expected


# --- settings that differ from those of the checkpoint that a run resumes from -------------------


def changed(**values: Any) -> list[str]:
    return list(find_changed_settings(to_dict(Config()), to_dict(as_config(values))))


@pytest.mark.spec("run.changed-settings")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.policy.optimizer_config.lr", 0.5),
        ("trainer.algorithm.policy_loss_type", "gspo"),
        ("trainer.row_layout", "tree"),
        ("generator.sampling_params.top_p", 0.5),
        ("generator.inference_engine.model_dtype", "bfloat16"),
        ("environment.env_class", "other"),
    ],
)
def test_settings_that_change_what_is_trained_are_found(key: str, value: Any) -> None:
    assert changed(**{key: value}) == [key]


@pytest.mark.spec("run.changed-settings")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.run_path", "elsewhere"),
        ("trainer.logger", ["wandb"]),
        ("trainer.eval_interval", 3),
        ("trainer.max_tokens_per_microbatch", 5),
        ("generator.inference_engine.num_threads", 2),
        ("generator.eval_sampling_params", {"temperature": 0.0}),
    ],
)
def test_other_settings_may_change(key: str, value: Any) -> None:
    assert changed(**{key: value}) == []


@pytest.mark.parametrize("saved", [None, [], "text", {"trainer": 3}, {"other": {"a": 1}}])
def test_settings_that_a_checkpoint_does_not_have_are_ignored(saved: Any) -> None:
    assert find_changed_settings(saved, to_dict(Config())) == {}


def test_what_a_checkpoint_has_does_not_change(caplog: pytest.LogCaptureFixture) -> None:
    key, rate = "trainer.policy.model.lora.target_modules", "trainer.policy.optimizer_config.lr"
    saved = to_dict(as_config({key: ["q_proj"]}))
    warn_of_changed_settings(saved, to_dict(Config()))
    warn_of_changed_settings(saved, to_dict(as_config({rate: 0.5})))
    kept = f"checkpoint's, whose values stay: {key}: ['q_proj'] -> ['all-linear']"
    assert [record.getMessage().partition("from the ")[2] for record in caplog.records] == [
        kept,
        f"checkpoint's and apply from here on: {rate}: 1e-06 -> 0.5",
        kept,
    ]


MODEL, ALGORITHM = "trainer.policy.model", "trainer.algorithm"


@pytest.mark.parametrize(
    ("key", "value", "others", "stays"),
    [
        (f"{MODEL}.path", "other", {}, True),
        (f"{MODEL}.path", "other", {f"{MODEL}.lora.rank": 2}, False),
        ("trainer.critic.model.path", "other", {}, True),
        (f"{ALGORITHM}.kl_loss_coef", 0.5, {}, False),
        (f"{ALGORITHM}.kl_loss_coef", 0.5, {f"{ALGORITHM}.kl_ctrl.type": "adaptive"}, True),
    ],
)
def test_a_warning_says_whether_a_changed_setting_applies(
    key: str, value: Any, others: dict[str, Any], stays: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before, now = (to_dict(as_config(of)) for of in (others, {key: value, **others}))
    warn_of_changed_settings(before, now)
    (record,) = caplog.records
    text = "whose values stay" if stays else "and apply from here on"
    assert f"{text}: {key}: " in record.getMessage()


@pytest.mark.parametrize(("kind", "coefficient"), [("fixed", 0.5), ("adaptive", 0.001)])
def test_a_fixed_kl_coefficient_may_change(
    kind: str, coefficient: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fill(tmp_path, monkeypatch, num_prompts=8)
    kl = (
        f"{ALGORITHM}.use_kl_in_reward=true",
        f"{ALGORITHM}.kl_ctrl.type={kind}",
        "trainer.plot=false",
    )
    first = (
        f"{ALGORITHM}.kl_loss_coef=0.001",
        "trainer.max_training_steps=1",
        "trainer.plot=false",
    )
    train(settings(folder, "run", *kl, *first))
    more = ("trainer.max_training_steps=2", "trainer.resume_mode=latest")
    outcome = train(settings(folder, "run", *kl, f"{ALGORITHM}.kl_loss_coef=0.5", *more))
    rows = [row for row in read_metrics(outcome.metrics) if row["step"] == 2]
    assert rows[-1]["loss/kl_loss_coef"] == pytest.approx(coefficient, rel=0.01)


def test_resumed_run_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = fill(tmp_path, monkeypatch, num_prompts=8)
    rate = "trainer.policy.optimizer_config.lr"
    train(settings(folder, "run", "trainer.max_training_steps=2", f"{rate}=0.001"))
    resumed = ("trainer.max_training_steps=3", "trainer.resume_mode=latest")
    with caplog.at_level(logging.WARNING):
        train(settings(folder, "run", *resumed, f"{rate}=0.002", "trainer.plot=false"))
    (warning,) = (r.getMessage() for r in caplog.records if "settings differ" in r.getMessage())
    assert warning.endswith(f"{rate}: 0.001 -> 0.002")
