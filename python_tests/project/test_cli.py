"""The command line: exit codes and output."""

import io
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from skyrl_fast.commands import train as train_command

pytest.importorskip("omegaconf")
pytest.importorskip("transformers")

import skyrl_fast
from skyrl_fast import cli
from skyrl_fast.config import Config
from skyrl_fast.config.settings import leaves
from skyrl_fast.errors import RunError
from skyrl_fast.rollout.engine.protocol import EngineDeadError
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.rollout.failures import RolloutError
from skyrl_fast.train import run as run_module
from skyrl_fast.train import supervised
from skyrl_fast.train.callbacks import CallbackError
from skyrl_fast.train.checkpoint.local import CheckpointError, RunInUseError
from skyrl_fast.train.output.summary import summary
from skyrl_fast.train.run import TrainResult
from skyrl_fast.train.setup.errors import SetupError
from skyrl_fast.trajectory_store.writer import StoreError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def yaml(tmp_path: Path) -> str:
    data = tmp_path / "a.jsonl"
    data.touch()
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").touch()
    path = tmp_path / "config.yaml"
    path.write_text(
        f"data: {{train_data: [{data}]}}\n"
        f"trainer: {{policy: {{model: {{path: {model}}}}}, run_path: runs/x}}\n"
    )
    return str(path)


def outcome(**changes: Any) -> TrainResult:
    values: dict[str, Any] = {
        "step": 40,
        "total_steps": 40,
        "signal": None,
        "evaluations": {0: 0.25, 20: 0.5, 40: 0.875},
        "run_path": Path("runs/x"),
        "metrics": Path("runs/x/metrics.jsonl"),
        "trajectories": Path("runs/x/trajectories"),
        "checkpoint": Path("runs/x/checkpoints/step_000040"),
        "plot": Path("runs/x/learning_curve.png"),
        "sample": "prompt: how many?\nagent, turn 1: 3\nreward: 1 (stop)",
    }
    return TrainResult(**(values | changes))


class FakeTraining:
    """Returns or raises the result, and remembers the settings."""

    def __init__(self, result: TrainResult | BaseException) -> None:
        self.result = result
        self.seen: list[Config] = []

    def __call__(self, config: Config) -> TrainResult:
        self.seen.append(config)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def run_train(training: FakeTraining, *words: str) -> int:
    command = partial(train_command.run, train=training)
    return cli.run_command(command, cli.parse_arguments(["train", *words]))


def test_train_prints_output_paths(
    yaml: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("trajectories", "checkpoints/step_000040"):
        Path("runs/x", folder).mkdir(parents=True)
    for file in ("metrics.jsonl", "learning_curve.png"):
        Path("runs/x", file).touch()
    training = FakeTraining(outcome())
    assert run_train(training, yaml, "trainer.seed=3") == 0
    (config,) = training.seen
    assert (config.trainer.seed, config.trainer.resume_mode) == (3, "none")
    printed = capsys.readouterr().out
    for text in (
        "finished: 40 of 40 steps",
        "evaluation reward: 0.250 before, 0.875 after",
        "runs/x/learning_curve.png",
        "runs/x/metrics.jsonl",
        "runs/x/trajectories",
        "skyrl-fast view runs/x",
        "runs/x/checkpoints/step_000040",
        "agent, turn 1: 3",
    ):
        assert text in printed


def test_signs_that_the_terminal_does_not_have_are_escaped(
    yaml: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert run_train(FakeTraining(outcome(sample="agent, turn 1: 日")), yaml) == 0
    sys.stdout.flush()
    assert b"agent, turn 1: \\u65e5" in sys.stdout.buffer.getvalue()


def test_printed_command_quotes_the_folder(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    (run / "trajectories").mkdir(parents=True)
    text = summary(outcome(run_path=run, trajectories=run / "trajectories"))
    (command,) = [line.partition("view it:")[2] for line in text.splitlines() if "view it" in line]
    assert shlex.split(command) == ["skyrl-fast", "view", str(run)]


@pytest.mark.parametrize(
    ("rewards", "line"),
    [
        ({"evaluations": {40: 0.875}}, "evaluation reward: 0.875 after\n"),
        ({"evaluations": {0: 0.25}}, "evaluation reward: 0.250 before\n"),
        ({"evaluations": {}}, None),
    ],
)
def test_missing_evaluation_is_not_shown(rewards: Any, line: str | None) -> None:
    text = summary(outcome(**rewards))
    assert ("evaluation reward" in text) == (line is not None)
    assert line is None or line in text


@pytest.mark.spec("run.summary")
def test_python_and_commands_end_with_the_same_summary_once(
    yaml: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_module, "run_request", lambda *_: outcome())
    monkeypatch.setattr(supervised, "run_request", lambda *_: outcome())
    expected = summary(outcome())
    for command in ("train", "sft"):
        assert cli.main([command, yaml]) == 0
        printed = capsys.readouterr()
        assert printed.out == expected
        assert "finished" not in printed.err
    for call in (skyrl_fast.train_agent, skyrl_fast.sft):
        assert call(yaml).step == 40
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err == expected


def test_python_is_told_how_to_resume(
    yaml: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_module, "run_request", lambda *_: outcome(step=7, signal=15))
    skyrl_fast.train_agent(yaml)
    printed = capsys.readouterr().err
    assert "stopped: 7 of 40 steps" in printed
    assert "call it again with trainer.resume_mode=latest" in printed
    assert "--resume" not in printed


def test_resume_uses_the_newest_checkpoint(yaml: str) -> None:
    training = FakeTraining(outcome())
    assert run_train(training, yaml, "--resume", "trainer.seed=4") == 0
    (config,) = training.seen
    assert (config.trainer.resume_mode, config.trainer.seed) == ("latest", 4)


@pytest.mark.parametrize(("signal", "code"), [(2, 130), (15, 143)])
def test_stopped_runs_say_how_to_continue(
    yaml: str,
    capsys: pytest.CaptureFixture[str],
    signal: int,
    code: int,
) -> None:
    assert run_train(FakeTraining(outcome(step=7, signal=signal)), yaml) == code
    printed = capsys.readouterr().out
    assert "stopped: 7 of 40 steps" in printed
    assert "with --resume to continue" in printed


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SetupError("model folder not found: m"), 2),
        (RunInUseError("run folder runs/x is in use by process 7"), 2),
        (CheckpointError("the disk is full"), 1),
        (EngineDeadError("the vLLM engine died"), 1),
        (WeightSyncError("the engine's logprobs differ"), 1),
        (RolloutError("all 8 trajectories failed"), 1),
        (StoreError("the disk is full"), 1),
        (CallbackError("callback Plot: on_step: ValueError"), 1),
        (RunError("1 node has the CPUs, 2 are needed"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_expected_errors_are_one_line(
    yaml: str,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
) -> None:
    assert run_train(FakeTraining(error), yaml) == code
    said = capsys.readouterr().err
    assert said.startswith("skyrl-fast: ")
    assert str(error) in said
    assert "Traceback" not in said


def test_unexpected_errors_keep_their_traceback(yaml: str) -> None:
    with pytest.raises(ZeroDivisionError):
        run_train(FakeTraining(ZeroDivisionError()), yaml)


def test_wrong_setting_is_reported(yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", yaml, "trainer.sead=3"]) == 2
    assert "did you mean trainer.seed?" in capsys.readouterr().err


REFUSED_WITHOUT_TORCH = (
    ("train YAML trainer.sead=3", "did you mean trainer.seed?"),
    ("train YAML trainer.seed=x", "trainer.seed: expected an integer"),
    ("train YAML trainer.seed", "expected dotted.key=value"),
    ("train no.yaml", "config file not found: no.yaml"),
    ("train YAML data.train_data=[no.jsonl]", "data.train_data: data file not found: no.jsonl"),
    (
        "train YAML generator.chat_template=no.jinja",
        "generator.chat_template: expected plain, the text of a template, or its file, got "
        "no.jinja",
    ),
    ("train YAML trainer.policy.model.path=./no", "model folder not found: ./no"),
    ("train YAML trainer.algorithm.policy_loss_type=no", "expected one of regular,"),
    ("train YAML trainer.algorithm.advantage_estimator=no", "expected one of grpo,"),
    ("sft YAML trainer.sead=3", "did you mean trainer.seed?"),
    ("plan YAML trainer.sead=3", "did you mean trainer.seed?"),
    ("plan YAML trainer.policy.model.path=./no", "model folder not found: ./no"),
    ("evaluate YAML trainer.sead=3", "did you mean trainer.seed?"),
    ("evaluate YAML data.val_data=[no.jsonl]", "data.val_data: data file not found: no.jsonl"),
    ("try YAML trainer.sead=3", "did you mean trainer.seed?"),
    ("engine YAML trainer.sead=3", "did you mean trainer.seed?"),
    ("gateway YAML trainer.sead=3", "did you mean trainer.seed?"),
    ("gateway --model m trainer.sead=3", "did you mean trainer.seed?"),
    ("tinker m trainer.sead=3", "did you mean trainer.seed?"),
    ("tinker m trainer.epochs=2", "trainer.epochs: has no meaning for skyrl-fast tinker"),
    ("quickstart trainer.sead=3", "did you mean trainer.seed?"),
    ("view .", "no trajectories in trajectories"),
    ("compare .", "expected a run folder, got one without metrics.jsonl"),
)
COMMANDS = """
import shlex, sys
from contextlib import suppress
from skyrl_fast.cli import main
for line in sys.stdin:
    print("command:", line.strip(), file=sys.stderr)
    code = 0
    with suppress(SystemExit):
        code = main(shlex.split(line))
    print(f"code {code}, torch: {'torch' in sys.modules}", file=sys.stderr)
"""


def test_commands_refuse_before_they_import_torch(yaml: str, tmp_path: Path) -> None:
    lines = ["--help", "init --help", "doctor --help", "settings lr"]
    lines += [command.replace("YAML", yaml) for command, _ in REFUSED_WITHOUT_TORCH]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        cwd=tmp_path,
        input="\n".join(lines),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    _, *reports = done.stderr.split("command: ")
    assert [report.splitlines()[0] for report in reports] == lines
    for report in reports[:4]:
        assert "code 0, torch: False" in report
    for report, (_, message) in zip(reports[4:], REFUSED_WITHOUT_TORCH, strict=True):
        assert message in report
        assert "code 2, torch: False" in report


def test_run_as_a_module(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "skyrl_fast", "train", str(tmp_path / "no.yaml")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.strip() == f"skyrl-fast: config file not found: {tmp_path / 'no.yaml'}"


def test_a_source_tree_says_that_it_hides_the_installed_package(tmp_path: Path) -> None:
    tree, installed = tmp_path / "tree", tmp_path / "installed"
    shutil.copytree(
        ROOT / "skyrl_fast", tree / "skyrl_fast", ignore=shutil.ignore_patterns("_C*.so")
    )
    (installed / "skyrl_fast").mkdir(parents=True)
    for name in ("__init__.py", "_C.cpython-311-x86_64-linux-gnu.so"):
        (installed / "skyrl_fast" / name).touch()
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        f"sys.path[:0] = {[str(tree), str(installed)]}\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"
        "import skyrl_fast\n"  # not by the finder of an editable installation
    )
    done = subprocess.run([sys.executable, "-I", script], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert f"hides the installed package {installed / 'skyrl_fast'}" in last
    assert "run Python from another folder" in last
    assert "During handling" not in done.stderr


def test_a_folder_is_no_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(tmp_path)]) == 2
    assert f"expected a YAML file, got the folder {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["kl coefficient"], "trainer.algorithm.kl_loss_coef"),
        (["coefficient", "kl"], "trainer.algorithm.kl_loss_coef"),
        (["thinking"], "generator.chat_template_kwargs"),
        (["learning rate"], "trainer.policy.optimizer_config.lr"),
    ],
)
def test_settings_are_found_by_the_words_that_people_use(
    words: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["settings", *words]) == 0
    assert f"{name} = " in capsys.readouterr().out


def test_help_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2
    assert "train" in capsys.readouterr().err


def test_version_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"skyrl-fast {skyrl_fast.__version__}\n"
    assert cli.main(["settings", "WARMUP"]) == 0
    listed = capsys.readouterr().out
    assert "trainer.policy.optimizer_config.num_warmup_steps = 0\n    " in listed
    assert "batched" not in listed
    assert cli.main(["settings", "batched"]) == 0
    assert "generator.batched (SkyRL only)\n    rollouts are" in capsys.readouterr().out
    assert cli.main(["settings", "nosuchword"]) == 1
    assert capsys.readouterr().out == "no setting has 'nosuchword' in its name or help\n"
    assert cli.main(["settings"]) == 0
    everything = capsys.readouterr().out
    assert all(f"{name} = " in everything for name, _, _ in leaves(Config()))
