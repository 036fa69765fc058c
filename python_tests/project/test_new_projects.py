"""The commands `init`, `quickstart` and `compare`, and what the end of a run prints."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from skyrl_fast.commands import quickstart

pytest.importorskip("omegaconf")
pytest.importorskip("transformers")

from skyrl_fast import cli
from skyrl_fast.commands import compare, init
from skyrl_fast.config.loading import load_config
from skyrl_fast.train.output import plot
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.output.metric_table import find_warnings
from skyrl_fast.train.output.summary import draw_curve

EVAL = "eval/all/avg_score"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init") / "my_agent"
    assert cli.main(["init", str(folder)]) == 0
    return folder


def run_in(project: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=project, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_new_project_passes_its_tests_and_can_be_tried(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "3 passed" in run_in(project, "pytest", "-q", "-p", "no:cacheprovider")
    monkeypatch.chdir(project)
    assert cli.main(["try", "config.yaml", "--answers", "8", "7"]) == 0
    tried = capsys.readouterr().out
    assert "observation: lower" in tried
    guide = Path(__file__).parents[2] / "docs/guide/first_agent.md"
    assert f"```text\n{tried}```" in guide.read_text(encoding="utf-8")


@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "models/mine"])
def test_a_project_of_a_pretrained_model(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models/mine").mkdir(parents=True)
    Path("models/mine/config.json").write_text("{}")
    assert cli.main(["init", "my agent", "--model", model]) == 0
    assert "  cd 'my agent'\n" in capsys.readouterr().out
    policy = load_config("my agent/config.yaml").trainer.policy
    path = str(tmp_path / model) if Path(model).exists() else model
    assert (policy.model.path, policy.optimizer_config.lr) == (path, 1e-5)
    assert not Path("my agent/model").exists()


@pytest.mark.parametrize("model", ["/no/such/folder", "m2typo", "empty"])
def test_a_project_of_a_missing_model_is_not_made(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    assert cli.main(["init", "agent", "--model", model]) == 2
    assert "init: --model: " in capsys.readouterr().err
    assert not Path("agent").exists()


def test_a_project_of_a_pretrained_model_has_its_lengths_and_several_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "agent", "--model", "Qwen/Qwen3-0.6B"]) == 0
    generator = load_config("agent/config.yaml").generator
    assert generator.sampling_params.max_generate_length == 128
    assert generator.max_input_length == 1024
    assert generator.chat_template_kwargs == {"enable_thinking": False}
    rows = [json.loads(line) for line in Path("agent/train.jsonl").read_text().splitlines()]
    assert {row["secret"] for row in rows} == set(range(1, 10))
    assert all("one number only" in row["prompt"] for row in rows)


def test_init_that_fails_or_is_interrupted_leaves_no_project(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["init", str(tmp_path / "file/agent")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err

    def stop(folder: Path, model: str | None) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        init.create_project(tmp_path / "agent", None, write=stop)
    assert not (tmp_path / "agent").exists()


@pytest.mark.parametrize(
    ("stop", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "skyrl-fast: stopped\n"),
        # As a run raises for SIGTERM before it trains.
        (SystemExit(143), 143, "skyrl-fast: stopped by SIGTERM\n"),
    ],
)
def test_a_stopped_command_says_so(
    stop: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(options: argparse.Namespace) -> int:
        raise stop

    assert cli.run_command(command, argparse.Namespace()) == code
    assert capsys.readouterr().err == said


def test_init_replaces_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", str(project)]) == 2
    assert f"got {project}" in capsys.readouterr().err


@pytest.mark.vllm
@pytest.mark.slow
def test_a_new_project_learns_and_is_viewed(project: Path) -> None:
    printed = run_in(project, "skyrl_fast.cli", "train", "config.yaml")
    assert "finished: 40 of 40 steps" in printed
    rewards = [row[EVAL] for row in read_metrics(project / "run/metrics.jsonl") if EVAL in row]
    assert rewards[0] < 0.35 and rewards[-1] > 0.45  # 0.25 by chance; every second number is 7
    assert "look at:" not in printed
    assert "trajectories in" in run_in(project, "skyrl_fast.cli", "view", "run")


def test_quickstart_trains_the_recipe(tmp_path: Path) -> None:
    from examples.tiny_model import recipe

    calls: list[Any] = []

    def start(chosen: recipe.Recipe, base: Path, overrides: Sequence[str], **how: bool) -> int:
        calls.append((chosen.config.name, base, list(overrides), how))
        return 7

    arguments = ["quickstart", "trainer.seed=7", "--base", str(tmp_path), "--resume"]
    assert quickstart.run(cli.command_parser().parse_args(arguments), start=start) == 7
    assert calls == [("config.yaml", tmp_path, ["trainer.seed=7"], {"is_resumed": True})]


def test_quickstart_names_a_base_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=f"{tmp_path / 'file'}: "):
        cli.main(["quickstart", "--base", str(tmp_path / "file")])


def write_run(folder: Path, values: Mapping[int, float | None]) -> str:
    folder.mkdir(parents=True)
    lines = [json.dumps({"step": step, EVAL: value}) + "\n" for step, value in values.items()]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return str(folder)


def test_compare_prints_and_draws_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "one", {0: 0.125, 10: 0.75, 20: 0.5})
    picture = tmp_path / "runs.png"
    two = write_run(tmp_path / "lr=0.1", {0: 0.25, 10: None})
    assert cli.main(["compare", f"lora={one}", f"lora={two}", two, "--out", str(picture)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[2] == ["0.125", "0.5", "0.75", "10", f"lora={one}"]
    assert lines[4] == ["0.25", "0.25", "0.25", "0", two]
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_names_with_dollars_are_no_formulas(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {0: 0.5, 1: 1.0})
    picture = tmp_path / "runs.png"
    assert cli.main(["compare", rf"$\frac$={run}", "--out", str(picture)]) == 0
    plot.plot_learning_curve([{"step": 0, EVAL: 0.5}], picture, title=r"$\frac$")


def test_compare_keeps_runs_of_one_folder_name_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"lr={n}/run", {0: float(n), 1: 0.5}) for n in range(2)]
    (tmp_path / "lr=1/run/metrics.jsonl").write_text(
        json.dumps({"step": 0, EVAL: None, "non_finite": {EVAL: "nan"}})
        + "\n" + json.dumps({"step": 1, EVAL: 0.5}) + "\n"
    )  # fmt: skip
    table, curves = compare.read_curves([*runs, f"rate=1={runs[1]}"], EVAL)
    lines = [line.split() for line in table.splitlines()]
    assert lines[2][:4] == ["0", "0.5", "0.5", "1"]
    assert lines[3][:4] == ["nan", "0.5", "0.5", "1"]
    assert list(curves) == [*runs, "rate=1"]


@pytest.mark.parametrize("metric", [EVAL, "policy/los"])
def test_compare_names_a_run_without_values(
    metric: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path / "one", {0: 0.5}), str(tmp_path)]
    assert cli.main(["compare", *runs, "--metric", metric]) == 2
    printed = capsys.readouterr()
    assert str(tmp_path) in printed.err
    assert printed.out == ""  # no head of a table that does not come


@pytest.mark.parametrize("metric", ["score", "eval/avg_score"])
def test_compare_suggests_metrics_of_the_run(
    metric: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "one", {0: 0.5})
    assert cli.main(["compare", run, "--metric", metric]) == 2
    assert f"(did you mean {EVAL}?)" in capsys.readouterr().err


def test_compare_says_which_metrics_a_run_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a run without evaluations, where the default has no values."""
    run = write_run(tmp_path / "one", {0: 0.5})
    assert cli.main(["compare", run, "--metric", "zzz"]) == 2
    assert f"--metric chooses another one, such as {EVAL}" in capsys.readouterr().err


def test_a_curve_has_a_bar_for_each_value() -> None:
    assert draw_curve([0.0, 0.5, 1.0]) == "▁▅█"
    assert draw_curve([2.0, 2.0]) == "▁▁"
    assert draw_curve([1.0]) == ""


def test_runs_without_a_label_are_curves_of_their_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    runs = [write_run(tmp_path / name / "seed0", {0: 0.5}) for name in ("a", "b")]
    _, curves = compare.read_curves(runs, EVAL)
    assert list(curves) == runs


@pytest.mark.parametrize(
    ("metric", "values", "warns"),
    [
        ("policy/clip_ratio", [0.1] * 6 + [0.3] * 2, True),
        ("policy/clip_ratio", [0.3] * 6 + [0.1] * 2, False),
        ("policy/policy_entropy", [1.0] * 6 + [0.05] * 2, True),
        ("policy/policy_entropy", [1.0] * 6 + [0.5] * 2, False),
        ("policy/policy_entropy", [1.0, 0.05], False),  # too few to call it a collapse
        ("reward/zero_variance_share", [0.9] * 4, True),
        ("generate/truncated_turn_share", [0.2], True),
        ("generate/too_long_prompt_share", [0.2], True),
        ("policy/rollout_train_logprobs_abs_diff_mean", [0.2], True),
        ("policy/loss", [9.0], False),
        ("planner/policy/clip_ratio", [0.3] * 4, True),  # of one of several policies
    ],
)
def test_unhealthy_ends_are_warned_of(metric: str, values: list[float], warns: bool) -> None:
    rows = [{"step": step, metric: value} for step, value in enumerate(values)]
    assert [line.split()[0] for line in find_warnings([{"step": 0}, *rows])] == [metric] * warns


def test_a_mismatch_with_older_weights_is_no_warning() -> None:
    metric = "policy/rollout_train_logprobs_abs_diff_mean"
    rows = [{"step": 1, metric: 0.2, "async/token_staleness_mean": 0.5}]
    assert not find_warnings(rows)
    assert find_warnings([{**rows[0], "async/token_staleness_mean": 0.0}])


@pytest.mark.parametrize(
    ("override", "wanted"),
    [("trainer.polcy.x=3", "did you mean trainer.policy"), ("--foo", "expected dotted.key=value")],
)
def test_quickstart_names_a_wrong_setting_before_it_makes_anything(
    override: str, wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["quickstart", "--base", str(tmp_path), override]) == 2
    assert wanted in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
