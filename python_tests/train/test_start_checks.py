"""What is wrong with a run's settings is found before a model is loaded."""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _training import Recorder, folder, settings

import skyrl_fast
from skyrl_fast import cli
from skyrl_fast.commands import engine
from skyrl_fast.commands.command import UsageError
from skyrl_fast.config import Config, ConfigError, EnvironmentConfig, as_config
from skyrl_fast.config.model_folder import ModelHub, model_folder
from skyrl_fast.rollout.env.factory import check_env_classes
from skyrl_fast.train.run import RunParts, RunRequest, limits_text, run_request
from skyrl_fast.train.setup.errors import SetupError
from skyrl_fast.train.setup.given_objects import GivenObjects, has_one_turn
from skyrl_fast.train.setup.run_data import run_data

__all__ = ["folder"]  # a fixture
TOO_LONG = (
    "generator.max_input_length (512) and generator.sampling_params.max_generate_length (1024): "
)


def make_no_models(*_: Any, **__: Any) -> Any:
    raise AssertionError("models were loaded")


def run_without_models(config: Config, **request: Any) -> None:
    """Run as `train_agent` does, up to the loading of models."""
    parts = RunParts(make_models=make_no_models)
    run_request(config, GivenObjects("train_agent"), RunRequest(parts=parts, **request))


@pytest.mark.spec("run.checks-before-models")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["environment.register=[nope.py]"], "environment.register: cannot import '"),
        (["environment.env_class=nope:Env"], "environment.env_class: cannot import 'nope'"),
        ([], "env_class of a row: no environment of the name 'fake' is registered (known: "),
        (["generator.max_input_length=512"], TOO_LONG + "expected at most the 64 positions of "),
        (
            [
                "generator.max_input_length=512",
                "generator.inference_engine.engine_init_kwargs.max_model_len=1000",
            ],
            TOO_LONG + "expected at most 1000 tokens together, as generator.inference_engine."
            "engine_init_kwargs.max_model_len says, got 1536",
        ),
    ],
)
def test_environments_and_lengths(folder: Path, overrides: list[str], message: str) -> None:
    pytest.importorskip("skyrl_gym")
    short = ["generator.max_input_length=32", "generator.sampling_params.max_generate_length=16"]
    chosen = overrides if "max_input_length" in str(overrides) else [*short, *overrides]
    with pytest.raises(SetupError) as caught:
        run_without_models(settings(folder, "run", *chosen))
    assert message in str(caught.value)


@pytest.mark.spec("run.unread-settings")
def test_settings_without_effect_are_named_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(
        folder,
        "run",
        "trainer.algorithm.kl_loss_coef=0.5",
        "trainer.fully_async.max_staleness_steps=2",
        "environment.env_class=nope:Env",
    )
    with pytest.raises(SetupError), caplog.at_level(logging.WARNING):
        run_without_models(config)
    (warning,) = [text for text in caplog.messages if "settings without effect" in text]
    assert "trainer.algorithm.kl_loss_coef=0.5 has no effect without " in warning
    assert (
        "trainer.fully_async.max_staleness_steps=2 has no effect without "
        "trainer.fully_async.enabled=true"
    ) in warning


def test_the_limits_of_a_trajectory_name_turns_only_where_it_may_have_several() -> None:
    several = {"generator.max_turns": 5}
    one = {"generator.max_turns": 1}
    lengths = ", prompts of 512 tokens (generator.max_input_length), answers of 1024 "
    for given, expected in (
        ({}, "at most 64 turns (generator.max_turns)"),
        (several, "at most 5 turns (generator.max_turns)"),
        (one, "one turn (generator.max_turns)"),
    ):
        assert limits_text(as_config(given)).startswith(f"a trajectory has {expected}{lengths}")
    assert limits_text(Config(), one_turn=True).startswith(f"a trajectory has one turn{lengths}")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"reward": lambda answer, row: 1.0}, True),
        ({"reward_funcs": [lambda completions: [1.0]]}, True),
        ({"env": lambda row: None}, False),
        ({}, False),
    ],
)
def test_reward_functions_have_one_turn(given: dict[str, Any], expected: bool) -> None:
    make_env = GivenObjects("train_agent", **given).write_into(Config())
    assert has_one_turn(make_env) is expected


# Settings with a mistake, and what the message must say. HERE is the folder of `mistakes`.
MISTAKES = {
    # names
    "trainer.learning_rate=1e-6": "did you mean trainer.policy.optimizer_config.lr?",
    "generator.max_new_tokens=9": "did you mean generator.sampling_params.max_generate_length?",
    "sampling_params.max_tokens=9": "did you mean generator.sampling_params?",
    "model.path=x": "did you mean trainer.policy.model?",
    "trainer.gradient_checkpoint=true": "did you mean trainer.gradient_checkpointing?",
    "data.train_files=[x]": "data has curriculum, mixture, train_data, val_data",
    "trainer.lora=true": "did you mean trainer.policy.model.lora?",
    "trainer.critic.model.lora.rank=8": "settings of trainer.policy.model.lora",
    "trainer.policy.model.lora.dropout=0.1": "the engine samples without dropout",
    "trainer.policy.model.lora.rank=-1": "expected at least 0, got -1",
    "trainer.policy.model.lora.rank=1000": "expected at most 512, vLLM's limit",
    "trainer.policy.model.lora.path=x": "lora.rank: expected more than 0 with",
    "trainer.strategy=fsdp2": "always FSDP2 if trainer.placement.policy_num_gpus_per_node",
    "trainer.bf16=true": "use trainer.policy.dtype",
    "generator.inference_engine.pipeline_parallel_size=2": "is vLLM's: generator.inference_engine",
    # numbers
    "trainer.epochs=-1": "trainer.epochs: expected at least 1, got -1",
    "trainer.epochs=many": "trainer.epochs: expected an integer, got 'many'",
    "trainer.train_batch_size=0": "expected at least 1, got 0",
    "trainer.train_batch_size=100": "expected at least trainer.train_batch_size=100 prompts, got 8",
    "trainer.policy_mini_batch_size=3": "a divisor of trainer.train_batch_size=4, got 3",
    "trainer.policy_mini_batch_size=8": "a divisor of trainer.train_batch_size=4, got 8",
    "trainer.max_tokens_per_microbatch=0": "expected at least 1, got 0",
    "trainer.policy.optimizer_config.lr=1e-6x": "lr: expected a number, got '1e-6x'",
    "trainer.algorithm.eps_clip_low=-0.2": "eps_clip_low: expected at least 0, got -0.2",
    "trainer.fully_async.max_staleness_steps=-1": "expected at least 0, got -1",
    "generator.n_samples_per_prompt=0": "expected at least 1, got 0",
    "generator.max_turns=0": "generator.max_turns: expected at least 1, got 0",
    "generator.max_input_length=4096": "expected at most the 64 positions of HERE/model together",
    "generator.sampling_params.top_p=2": "expected at most 1, got 2.0",
    "generator.inference_engine.gpu_memory_utilization=1.5": "expected at most 1, got 1.5",
    "trainer.placement.policy_num_gpus_per_node=0": "expected at least 1, got 0",
    "environment.timeout_seconds=0": "expected more than 0, got 0.0",
    # choices
    "trainer.device=gpu": "expected one of auto, cpu, cuda, got 'gpu' (did you mean 'cuda'?)",
    "trainer.row_layout=trees": "did you mean 'tree'?",
    "trainer.algorithm.advantage_estimator=gpro": "did you mean 'grpo'?",
    "trainer.algorithm.policy_loss_type=ppo": "did you mean 'regular'?",
    "trainer.algorithm.kl_estimator_type=k4": "expected one of k1, abs, k2, k3, got 'k4'",
    "trainer.algorithm.loss_reduction=mean": "expected one of token_mean, sequence_mean,",
    "trainer.policy.optimizer_config.scheduler=cosin": "did you mean 'cosine'?",
    "trainer.resume_mode=lastest": "did you mean 'latest'?",
    "trainer.logger=[wandbb]": "did you mean 'wandb'?",
    "trainer.progress=[rewards]": "did you mean 'reward'?",
    "generator.inference_engine.model_dtype=float64": "expected one of auto, float32,",
    "generator.inference_engine.weight_sync_backend=nfs": "got 'nfs'",
    "environment.workers=fork": "expected one of thread, process, got 'fork'",
    # files, modules, and what is in them
    "trainer.policy.model.path=HERE/nothing": "trainer.policy.model.path: model folder not found",
    "trainer.policy.model.path=HERE": "expected the folder of a model, got HERE: no config.json",
    "trainer.resume_mode=from_path": "trainer.resume_path: expected a checkpoint folder",
    "trainer.algorithm.policy_loss_type=HERE/code.py:none": "'HERE/code.py' has no 'none'",
    "environment.env_class=nosuch": "no environment of the name 'nosuch' is registered (known: ",
    "environment.env_class=HERE/code.py:None_": "environment.env_class: 'HERE/code.py' has no",
    "environment.env_class=HERE/broken.py:Env": "ModuleNotFoundError: No module named 'no_such_m",
    "data.train_data=[HERE/none.jsonl]": "data file not found: HERE/none.jsonl",
    "data.train_data=[HERE/empty.jsonl]": "expected at least trainer.train_batch_size=4 prompts",
    "data.train_data=[HERE/broken.jsonl]": "HERE/broken.jsonl, line 1: invalid JSON",
    "data.train_data=[HERE/columns.jsonl]": "HERE/columns.jsonl, row 0: prompt: expected a list",
    "generator.chat_template_kwargs.tools=5": "tools: expected a list of mappings (JSON schemas",
}


@pytest.fixture
def mistakes(folder: Path) -> Path:
    """Return a folder with a model, prompts without an environment, and files with mistakes."""
    texts = {
        "train.jsonl": '{"prompt": "2?", "reward_spec": {"ground_truth": "2"}}\n' * 8,
        "val.jsonl": "",
        "code.py": "",
        "broken.py": "import no_such_module\n",
        "empty.jsonl": "",
        "broken.jsonl": '{"prompt": \n',
        "columns.jsonl": '{"question": "2?"}\n',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


def answer_to(folder: Path, override: str) -> str:
    """Return the message to a run with this setting."""
    given = [
        "generator.max_input_length=32",
        "generator.sampling_params.max_generate_length=16",
        "environment.env_class=gsm8k",
        override.replace("HERE", str(folder)),
    ]
    with pytest.raises((ConfigError, SetupError)) as caught:
        run_without_models(settings(folder, "run", *given))
    return str(caught.value).replace(str(folder), "HERE")


@pytest.mark.spec("settings.one-line-errors")
@pytest.mark.spec("run.failure")
def test_mistakes_are_answered_in_a_line_before_a_model_is_loaded(mistakes: Path) -> None:
    pytest.importorskip("skyrl_gym")
    for override, wanted in MISTAKES.items():
        message = answer_to(mistakes, override)
        assert wanted in message and "\n" not in message, (override, message)
        assert not (mistakes / "run").exists(), override


def test_settings_without_a_mistake_reach_the_models(mistakes: Path) -> None:
    pytest.importorskip("skyrl_gym")
    with pytest.raises(AssertionError, match="models were loaded"):
        answer_to(mistakes, "generator.chat_template=plain")
    reason = mistakes / "run/failure.txt"
    assert reason.read_text() == "AssertionError: models were loaded\n"


@pytest.mark.spec("run.checks-before-models")
def test_logger_without_a_key_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError("api_key not configured (no-tty).\n  Call wandb.login(key=...)")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with pytest.raises(SetupError) as caught:
        run_without_models(
            settings(folder, "run", "trainer.logger=[jsonl,wandb]"), make_rollouts=Recorder()
        )
    assert str(caught.value) == (
        "trainer.logger: wandb did not start: RuntimeError: api_key not configured (no-tty). "
        "Call wandb.login(key=...)"
    )
    assert not (folder / "run").exists()


@pytest.mark.spec("run.row-environments")
@pytest.mark.parametrize("chosen", ["gsm8k", "mine"])
def test_environments_of_rows_that_replace_a_chosen_one_are_named(
    folder: Path, chosen: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(folder, "run", f"environment.env_class={chosen}")
    with caplog.at_level(logging.WARNING):
        run_data(config, None, None, one_env=False)
    told = (
        "environment.env_class=mine is not used for 12 of 12 rows, whose column env_class takes "
        "precedence: fake (12)"
    )
    assert [record.getMessage() for record in caplog.records] == (
        [told] if chosen == "mine" else []
    )


@pytest.mark.spec("run.row-environments")
@pytest.mark.parametrize("own", [False, True])
def test_code_that_a_row_names_is_imported_only_if_that_is_allowed(
    tmp_path: Path, own: bool
) -> None:
    code = tmp_path / "of_a_row.py"
    code.write_text("raise ValueError('it was imported')\n")
    name = f"{code}:Env"
    refusing = EnvironmentConfig(env_class=name if own else "gsm8k", import_row_env_classes=False)
    expected = "it was imported" if own else "import_row_env_classes is false, .*of_a_row.py:Env"
    with pytest.raises(ValueError, match=expected):
        check_env_classes([name], refusing)
    with pytest.raises(ValueError, match="it was imported"):
        check_env_classes([name], EnvironmentConfig())


@pytest.mark.spec("advantage.group-of-one-warning")
@pytest.mark.parametrize(
    ("estimator", "samples", "warns"),
    [("grpo", 1, True), ("maxrl", 1, True), ("grpo", 2, False), ("reinforce++", 1, False)],
)
def test_group_of_one_has_no_baseline(
    folder: Path, estimator: str, samples: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    changes = [
        f"trainer.algorithm.advantage_estimator={estimator}",
        f"generator.n_samples_per_prompt={samples}",
        "data.train_data=[nowhere.jsonl]",
    ]
    with pytest.raises(SetupError, match="data file not found"):
        skyrl_fast.train_agent(settings(folder, "run", *changes), make_rollouts=Recorder())
    assert ("without a baseline" in caplog.text) == warns


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return the folder of org/model in a cache of the hub, with a part of a model."""
    pytest.importorskip("huggingface_hub")
    snapshot = tmp_path / "models--org--model/snapshots/abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--model/refs").mkdir()
    (tmp_path / "models--org--model/refs/main").write_text("abc")
    (snapshot / "config.json").write_text("{}")
    return snapshot


class UnreachableHub(ModelHub):
    """A hub whose requests fail, with the names that are asked for."""

    def __init__(self, cache: Path) -> None:
        super().__init__(cache)
        self.asked: list[str] = []

    def check(self, name: str) -> None:
        self.asked.append(name)
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise ConnectionError("[Errno -2] Name or service not known\nmore lines")


@pytest.mark.spec("run.hub-models")
def test_unreachable_hub_is_one_line(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub = UnreachableHub(tmp_path)
    with pytest.raises(ValueError, match=r"^trainer\.policy\.model\.path: org/other is no") as one:
        model_folder("org/other", hub=hub)
    assert "ConnectionError: [Errno -2] Name or service not known): check the name" in str(
        one.value
    )
    assert "\n" not in str(one.value)
    assert (hub.asked, caplog.text) == (["org/other"], "")


@pytest.mark.spec("run.hub-models")
def test_complete_download_needs_no_network(cache: Path, tmp_path: Path) -> None:
    hub = UnreachableHub(tmp_path)
    assert model_folder("org/model", with_weights=False, hub=hub) == cache
    shards = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (cache / "model.safetensors.index.json").write_text(json.dumps(shards))
    (cache / "model-1.safetensors").touch()
    with pytest.raises(ValueError, match="cannot be downloaded"):
        model_folder("org/model", hub=hub)
    (cache / "model-2.safetensors").touch()
    assert model_folder("org/model", hub=hub) == cache
    assert hub.asked == ["org/model"]


def test_engine_command_downloads_as_train_does(cache: Path, tmp_path: Path) -> None:
    class Hub(ModelHub):
        def check(self, name: str) -> None:
            """It has the model."""

        def download(self, name: str, patterns: Sequence[str]) -> Path:
            (cache / "model.safetensors").touch()
            return cache

    served: list[str] = []

    def execute(program: str, command: list[str], variables: Any) -> None:
        served.append(command[command.index("serve") + 1])
        raise SystemExit(0)

    config = tmp_path / "run.yaml"
    config.write_text(
        "data: {train_data: [a.jsonl]}\n"
        f"trainer: {{policy: {{model: {{path: org/model}}}}, run_path: {tmp_path}/run}}\n"
    )
    options = cli.command_parser().parse_args(["engine", str(config)])
    with pytest.raises(SystemExit):
        engine.run(options, hub=Hub(tmp_path), execute=execute)
    assert served == [str(cache)]
    options.overrides = ["trainer.policy.model.path=org/other"]
    wanted = r"^trainer\.policy\.model\.path: org/other is no folder[^\n]*$"
    with pytest.raises(UsageError, match=wanted):
        engine.run(options, hub=UnreachableHub(tmp_path), execute=execute)
