"""Evaluation without training: what a target is, equal to a run's, compared prompt by prompt."""

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from _fakes import TURNS, FakeRollouts, FakeTokenizer, tiny_model
from _training import folder as folder  # a fixture
from _training import settings, train

from skyrl_fast.cli import command_parser, main
from skyrl_fast.commands import evaluate as evaluate_command
from skyrl_fast.config import Config
from skyrl_fast.rollout.failures import RolloutError
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train import SetupError, evaluate, evaluation
from skyrl_fast.train.metrics.evaluation import estimate, paired_difference
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.trajectory_store.parts import part_name, read_lines

# A rate at which 6 steps change what is sampled.
LORA = (
    "trainer.policy.model.lora.rank=2",
    "trainer.policy.model.lora.alpha=32",
    "trainer.seed=7",
)


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "load_tokenizer", lambda path: FakeTokenizer())


class Started(FakeRollouts):
    """Rollouts of the model in a folder, as an engine starts with it."""

    started: ClassVar[list["Started"]] = []

    @classmethod
    async def make(cls, config: Config, tokenizer: Any, path: str) -> "Started":
        from transformers import AutoModelForCausalLM

        cls.started.append(cls(config, AutoModelForCausalLM.from_pretrained(path)))
        return cls.started[-1]


@pytest.fixture(autouse=True)
def nothing_started() -> None:
    Started.started.clear()


def report(result: evaluation.Evaluation) -> dict[str, float]:
    """Return the metrics as read back from the target's folder."""
    (row,) = read_metrics(result.folder / "metrics.jsonl")
    return {name: value for name, value in row.items() if name.startswith("eval/")}


def sampled(folder: Path, step: int) -> list[Any]:
    """Return the tokens and log-probabilities of an evaluation's stored trajectories."""
    part = folder / "trajectories" / part_name(step, "eval")
    tokens = [turn for _, _, record in read_lines(part) for turn in record["tokens"]]
    return [
        (turn["prompt_token_ids"], turn["response_ids"], turn["rollout_logprobs"])
        for turn in tokens
    ]


@pytest.mark.spec("evaluate.equal")
@pytest.mark.parametrize("lora", [(), LORA], ids=["all weights", "lora"])
def test_checkpoints_score_what_their_run_reported(folder: Path, lora: tuple[str, ...]) -> None:
    config = settings(folder, "run", "generator.eval_n_samples_per_prompt=3", *lora)
    result = train(config)
    reported = {row["step"]: row for row in read_metrics(result.metrics)}
    checkpoints = sorted((folder / "run" / "checkpoints").glob("step_*"))
    assert len(checkpoints) == 3
    targets = [folder / "model", *checkpoints, folder / "run"]
    results = evaluate(config, targets, out=folder / "out", make_rollouts=Started.make)
    assert [one.step for one in results] == [0, 2, 4, 6, 6]
    assert [one.name for one in results][1] == checkpoints[0].name
    for one in results:
        of_run = reported[one.step]
        expected = {name: value for name, value in of_run.items() if name.startswith("eval/")}
        found = report(one)
        assert {name: found[name] for name in expected} == expected
        assert found.keys() - expected.keys() == {"eval/all/pass_at_2"}
        assert len(sampled(one.folder, one.step)) == 4 * 3 * TURNS
        # The same tokens and log-probabilities, to the bit.
        assert sampled(one.folder, one.step) == sampled(folder / "run", one.step)
    assert sampled(results[0].folder, 0) != sampled(results[3].folder, 6)
    assert all(one.closed for one in Started.started)
    written = json.loads((folder / "out" / "evaluation.json").read_text())["evaluations"]
    assert written[3]["difference"]["mean"] == results[3].difference(results[0]).mean
    assert "difference" not in written[0]


def test_an_adapter_is_evaluated_on_the_base_of_the_settings(folder: Path) -> None:
    config = settings(folder, "run", *LORA)
    checkpoint = train(config).checkpoint
    assert checkpoint is not None
    adapter = checkpoint / "policy"
    assert (adapter / "adapter_config.json").is_file()
    # Its rank and scale are its file's, not those of the settings.
    plain = settings(folder, "other", "trainer.seed=7")
    of_adapter, of_checkpoint, base = evaluate(
        plain,
        [adapter, checkpoint, folder / "model"],
        out=folder / "out",
        make_rollouts=Started.make,
    )
    # An engine joins modules by the last parts of their names; the file has full ones.
    targets = Started.started[0].config.trainer.policy.model.lora.target_modules
    assert "q_proj" in targets
    assert not any("." in name for name in targets)
    trained = sampled(of_checkpoint.folder, 6)
    assert sampled(of_adapter.folder, 0) == trained
    assert sampled(base.folder, 0) != trained


def test_an_export_scores_what_its_checkpoint_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path: FakeTokenizer())
    config = settings(folder, "run", *LORA)
    train(config)
    for kind in ("model", "adapter"):
        assert main(["export", f"{folder}/run", f"{folder}/{kind}s", "--to", kind]) == 0
    targets = [folder / "run", folder / "models", folder / "adapters"]
    trained, merged, adapter = evaluate(
        config, targets, out=folder / "out", make_rollouts=Started.make
    )
    assert trained.scores == merged.scores == adapter.scores
    for of_checkpoint, of_model in zip(
        sampled(trained.folder, 6), sampled(merged.folder, 0), strict=True
    ):
        assert of_model[:2] == of_checkpoint[:2]
        assert of_model[2] == pytest.approx(of_checkpoint[2], abs=1e-5)  # merged in float32
    assert sampled(adapter.folder, 0) == sampled(trained.folder, 6)


def test_a_target_is_named_once_and_the_settings_model_is_the_default(folder: Path) -> None:
    config = settings(folder, "run", *LORA)
    model = str(folder / "model")
    twice = evaluate(config, [model, model], out=folder / "twice", make_rollouts=Started.make)
    assert [one.name for one in twice] == ["model", "model-2"]
    (alone,) = evaluate(config, out=folder / "alone", make_rollouts=Started.make)
    assert alone.scores == twice[0].scores == twice[1].scores
    assert twice[1].difference(twice[0]) == (0.0, 0.0)


def test_what_cannot_be_evaluated_is_named_before_an_engine_starts(folder: Path) -> None:
    config = settings(folder, "run")

    def attempt(*targets: str | Path, out: Path = folder / "out", config: Config = config) -> None:
        evaluate(config, targets, out=out, make_rollouts=Started.make)

    (folder / "empty").mkdir()
    with pytest.raises(SetupError, match="empty: expected the folder of a run with a checkpoint"):
        attempt(folder / "model", folder / "empty")
    with pytest.raises(SetupError, match=r"^targets: model folder not found: \./nothing"):
        attempt("./nothing")
    with pytest.raises(SetupError, match="out: expected no such file or folder"):
        attempt(folder / "model", out=folder / "empty")
    with pytest.raises(SetupError, match=r"data\.val_data: expected prompts to evaluate on"):
        attempt(config=settings(folder, "run", "data.val_data=[]"))
    with pytest.raises(SetupError, match="evaluate: expected one of env, reward"):
        evaluate(config, out=folder / "out", reward=lambda answer, row: 0.0, env="fake")
    assert not Started.started
    assert not (folder / "out").exists()


def test_an_evaluation_in_which_everything_fails_ends_with_the_reason(folder: Path) -> None:
    class Failing(Started):
        async def generate(self, *args: Any, **options: Any) -> list[Trajectory]:
            trajectories = await super().generate(*args, **options)
            for one in trajectories:
                one.failure = "environment fake: step raised KeyError: 'answer'"
                one.steps = []
            return trajectories

    with pytest.raises(RolloutError, match="KeyError"):
        evaluate(settings(folder, "run"), out=folder / "out", make_rollouts=Failing.make)
    assert Started.started[0].closed


@pytest.mark.spec("evaluate.paired")
def test_paired_errors_are_those_of_a_bootstrap() -> None:
    random = np.random.default_rng(0)
    hardness = random.normal(size=400)
    noise = random.normal(size=(2, 400)) / 5
    first = {str(i): float(hardness[i] + noise[0, i]) for i in range(400)}
    second = {str(i): float(hardness[i] + noise[1, i] + 0.1) for i in range(400)}
    difference = paired_difference(first, second)
    values = np.array([second[uid] - first[uid] for uid in first])
    drawn = values[random.integers(0, 400, size=(4000, 400))].mean(axis=1)
    assert difference.mean == pytest.approx(values.mean())
    assert difference.error == pytest.approx(drawn.std(), rel=0.05)
    # Unpaired, the prompts' hardness would hide it.
    assert difference.error < 0.3 * estimate(first).error
    with pytest.raises(ValueError, match="1 and 0 others"):
        paired_difference({"a": 0.0, "b": 0.0}, {"a": 1.0})


def test_one_prompt_has_no_standard_error() -> None:
    assert estimate({"a": 0.5}).mean == 0.5
    assert np.isnan(estimate({"a": 0.5}).error)


def test_the_command_prints_a_row_for_each_target(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(seed=2).save_pretrained(folder / "better")
    (folder / "config.yaml").write_text(
        f"trainer: {{policy: {{model: {{path: {folder}/model}}}}, run_path: {folder}/run}}\n"
    )
    command = ["evaluate", f"{folder}/config.yaml", f"{folder}/model", f"{folder}/better"]
    options = ["trainer.seed=3", "--data", f"{folder}/val.jsonl", "--samples", "2"]
    parsed = command_parser().parse_args([*command, *options])
    assert evaluate_command.run(parsed, make_rollouts=Started.make) == 0
    printed = capsys.readouterr()
    header, base, better = printed.out.splitlines()[:3]
    assert header.split()[:4] == ["model", "score", "error", "pass@1"]
    assert header.split()[-2:] == ["difference", "error"]
    assert base.startswith("model ") and better.startswith("better ")
    scores = [float(line.split()[1]) for line in (base, better)]
    assert float(better.split()[-2]) == pytest.approx(scores[1] - scores[0], abs=1e-4)
    assert "4 prompts; errors are standard errors over prompts" in printed.out
    assert "pass@k: one of k samples has a reward above 0, " in printed.out
    assert "model: 4 prompts, 2 trajectories of each" in printed.err
    assert Started.started[0].config.trainer.seed == 3
    assert (folder / "run" / "evaluations" / "1" / "evaluation.json").is_file()
    # Each has a folder as of a run, which `compare` reads.
    folders = [f"{folder}/run/evaluations/1/{name}" for name in ("model", "better")]
    assert main(["compare", *folders]) == 0
    assert f"{scores[0]:.4g}" in capsys.readouterr().out
    parsed = command_parser().parse_args([*command, *options])
    assert evaluate_command.run(parsed, make_rollouts=Started.make) == 0
    assert (folder / "run" / "evaluations" / "2").is_dir()
