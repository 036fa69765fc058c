"""`skyrl_fast.train`: argument types, callbacks, signals."""

import asyncio
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _training import Recorder, settings
from _training import folder as folder  # a fixture
from fake_envs import FakePrompt, ScriptedEngine, loop_config, says
from process_envs import exact, only_hard, ranked, short

import skyrl_fast
from skyrl_fast.config import Config, ConfigError, EnvironmentConfig, OptimizerConfig, as_config
from skyrl_fast.rollout.engine.protocol import EngineError
from skyrl_fast.rollout.engine.weights.gate import WeightGate
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.env.reward_env import RewardEnv
from skyrl_fast.rollout.env.reward_functions import TEXT_PROMPT, GroupRewards, RewardFunctions
from skyrl_fast.rollout.groups import environment_runner, run_groups
from skyrl_fast.rollout.policy_calls import PolicyCalls
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train import Callback, CallbackError, SetupError
from skyrl_fast.train.checkpoint.local import read_state
from skyrl_fast.train.data.prompts import prompts_from
from skyrl_fast.train.output.loggers import read_metrics

ROOT = Path(__file__).parents[2]
REACHED = """
import sys
import skyrl_fast
import skyrl_fast.train
import skyrl_fast.rollout.env.reward_functions  # in processes of them
assert "torch" not in sys.modules
assert "train_agent" in dir(skyrl_fast)
assert skyrl_fast.train_agent is skyrl_fast.train.train_agent
assert "transformers" not in sys.modules
"""


def test_train_agent_is_available_without_importing_the_trainer() -> None:
    subprocess.run([sys.executable, "-c", REACHED], check=True, cwd=ROOT)
    parameters = inspect.signature(skyrl_fast.train_agent).parameters
    assert list(parameters)[:4] == ["config", "env", "prompts", "eval_prompts"]
    for name in skyrl_fast.train.__all__:
        assert getattr(skyrl_fast.train, name).__doc__, name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = skyrl_fast.train.nothing


# --- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        {"trainer.seed": 7, "trainer.policy.optimizer_config.lr": 1},
        {"trainer": {"seed": 7, "policy.optimizer_config": {"lr": 1}}},
        {"trainer": {"seed": 7}, "trainer.policy": {"optimizer_config": OptimizerConfig(lr=1.0)}},
    ],
)
def test_mappings_with_nested_and_dotted_keys(source: dict[str, Any]) -> None:
    before = repr(source)
    config = as_config(source)
    assert config.trainer.seed == 7
    assert config.trainer.policy.optimizer_config.lr == 1.0
    assert type(config.trainer.policy.optimizer_config.lr) is float
    assert repr(source) == before


def test_mapping_in_place_of_a_section_is_converted() -> None:
    config = Config()
    config.generator.eval_sampling_params = {"temperature": 0}  # type: ignore[assignment]
    config.trainer.policy = {"optimizer_config": {"lr": 0.5}}  # type: ignore[assignment]
    config.trainer.run_path = Path("runs/x")  # type: ignore[assignment]
    config.data.train_data = ("a.jsonl",)  # type: ignore[assignment]
    built = as_config(config)
    assert built.generator.eval_sampling_params is not None
    assert built.generator.eval_sampling_params.temperature == 0.0
    assert built.trainer.policy.optimizer_config.lr == 0.5
    assert (built.trainer.run_path, built.data.train_data) == ("runs/x", ["a.jsonl"])
    assert built is not config


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"trainer": {"policy": {"optimizer_confg": {}}}}, "did you mean trainer.policy.optimizer"),
        ({"trainer.policy": {"model": "m"}}, "trainer.policy.model: expected a section with keys"),
        ({"trainer.seed": 1, "trainer": {"seed": 2}}, "trainer: given twice"),
        ({"trainer": 3, "trainer.seed": 1}, "trainer.seed: given twice"),
        ({"trainer.seed": "x"}, "trainer.seed: expected an integer"),
        (7, "config: expected a Config, a mapping or the path of a YAML file, got 7"),
        ("nowhere.yaml", "config file not found: nowhere.yaml"),
    ],
)
def test_invalid_settings_error_names_the_dotted_key(source: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        skyrl_fast.train_agent(source)


def test_settings_from_a_yaml_file_and_prompts_in_memory(folder: Path, tmp_path: Path) -> None:
    yaml = tmp_path / "run.yaml"
    yaml.write_text(
        f"trainer: {{run_path: {folder}/run, policy: {{model: {{path: {folder}/model}}}}, plot: no,"
        " train_batch_size: 2, policy_mini_batch_size: 2, logger: [jsonl]}\n"
        "generator: {n_samples_per_prompt: 2}\n"
    )
    with pytest.raises(ConfigError, match=r"data\.train_data: expected at least one file"):
        skyrl_fast.train_agent(yaml)
    result = skyrl_fast.train_agent(yaml, prompts=["4", "5"], make_rollouts=Recorder())
    assert (result.step, result.before) == (1, None)
    with pytest.raises(SetupError, match=r"prompts: expected at least trainer\.train_batch_size=2"):
        skyrl_fast.train_agent(
            {"trainer.run_path": folder / "b", "trainer.policy.model.path": folder / "model"}
            | {"trainer.train_batch_size": 2, "trainer.policy_mini_batch_size": 2},
            prompts=["4"],
        )


# --- prompts -----------------------------------------------------------------------------------


def test_prompt_formats(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "from a file", "answer": 3}\n')
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    found = prompts_from(
        ["plain", chat, {"prompt": "row", "env_class": "own", "n": 1}, file, str(file)],
        default_env_class="d",
        prefix="x-",
    )
    assert [p.uid for p in found] == ["x-0", "x-1", "x-2", "x-3", "x-4"]
    contents = [[message["content"] for message in prompt.messages] for prompt in found]
    assert contents == [["plain"], ["s", "u"], ["row"], ["from a file"], ["from a file"]]
    assert [p.env_class for p in found] == ["d", "d", "own", "d", "d"]
    assert [p.env_extras for p in found] == [{}, {}, {"n": 1}, {"answer": 3}, {"answer": 3}]
    for source in (file, str(file)):
        (one,) = prompts_from(source, default_env_class="d")
        assert one.env_extras == {"answer": 3}
    assert len(prompts_from(({"prompt": str(i)} for i in range(3)), default_env_class="d")) == 3
    assert prompts_from(["Fix data.json"], default_env_class="d")[0].messages == [
        {"role": "user", "content": "Fix data.json"}
    ]


def test_hub_data_set_requires_the_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    wanted = "org/name; a dataset on the hub needs datasets: pip install datasets"
    with pytest.raises(ValueError, match=wanted):
        prompts_from("org/name", default_env_class="d")


def test_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    pyarrow = pytest.importorskip("pyarrow")
    rows = [{"prompt": [{"role": "user", "content": c}], "answer": c} for c in "ab"]
    table = datasets.table.InMemoryTable(pyarrow.Table.from_pylist(rows))
    found = prompts_from(datasets.Dataset(table, fingerprint="rows"), default_env_class="d")
    assert [(p.messages, p.env_extras) for p in found] == [
        ([{"role": "user", "content": "a"}], {"answer": "a"}),
        ([{"role": "user", "content": "b"}], {"answer": "b"}),
    ]

    def load_dataset(name: str, *, split: str) -> list[dict[str, str]]:
        if name == "org/nothing":
            raise ConnectionError("no route")
        return [{"prompt": f"{name} {split}"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (one,) = prompts_from("org/name", default_env_class="d", split="test")
    assert one.messages[0]["content"] == "org/name test"
    wanted = (
        "org/nothing: no such file, and no dataset on the hub with the split 'train': Connection"
    )
    with pytest.raises(ValueError, match=wanted):
        prompts_from("org/nothing", default_env_class="d")


# --- objects -----------------------------------------------------------------------------------


async def test_reward_function_is_a_single_turn_environment() -> None:
    def reward(answer: str, row: dict[str, Any]) -> float:
        return len(answer) + row["bonus"] + len(row["prompt"])

    factory = EnvFactory(EnvironmentConfig(), make_env=lambda extras: RewardEnv(reward, extras))
    env = await factory.make("any", {"bonus": 10})
    prompt = [{"role": "user", "content": "?"}]
    assert await env.init(prompt) == prompt
    answer = await env.step("four")
    await env.close()
    await factory.close()
    assert (answer.reward, answer.done, answer.messages) == (15.0, True, [])


def rewarded(
    make_env: RewardFunctions,
    tokenizer: Any,
    extras: dict[str, Any],
    answers: list[str | Exception],
    **environment: Any,
) -> list[Trajectory]:
    """Return the trajectories of one group with these answers."""

    async def go() -> list[Trajectory]:
        def answer(call: Any, n: int) -> Any:
            said = answers[int(call.session_id.split("-")[-2])]  # of the repetition
            return says(tokenizer, said) if isinstance(said, str) else said

        engine = ScriptedEngine(answer)
        factory = EnvFactory(EnvironmentConfig(**environment), make_env=make_env)
        calls = PolicyCalls(engine, WeightGate(7), tokenizer, 1)
        config = loop_config(n_samples_per_prompt=len(answers), max_turns=1, max_retries=0)
        rewards = GroupRewards(factory, attempts=2)
        runner = environment_runner(calls, factory, config, on_group=rewards)
        prompt = FakePrompt("p", env_extras=extras)
        try:
            return await run_groups(runner, [prompt], phase="train", policy_version=7)
        finally:
            await factory.close()

    return asyncio.run(go())


def rewards_of(trajectories: list[Trajectory]) -> list[float]:
    return [step.reward for t in trajectories for step in t.steps]


@pytest.mark.spec("run.reward-functions")
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_reward_functions_are_called_as_by_trl(workers: str, tiny_tokenizer: Any) -> None:
    made = RewardFunctions([exact, short, only_hard, ranked], [2.0, 0.5, 1.0, 3.0])
    row = {"answer": "4", "level": "easy"}
    group = rewarded(made, tiny_tokenizer, row, ["is 4", "5"], workers=workers)
    assert rewards_of(group) == [2.0 - 0.5 * 4, -0.5 + 3.0 * 0.5]
    assert [t.env_metrics for t in group] == [
        {"reward_exact": 1.0, "reward_short": -4.0, "reward_ranked": 0.0, "length": 5.0},
        {"reward_exact": 0.0, "reward_short": -1.0, "reward_ranked": 0.5, "length": 5.0},
    ]
    (one,) = rewarded(made, tiny_tokenizer, {**row, "level": "hard"}, ["5"], workers=workers)
    assert one.steps[0].reward == -0.5 + 1.0
    assert one.env_metrics["reward_only_hard"] == 1.0


@pytest.mark.spec("run.reward-functions")
def test_answers_without_a_failure_are_rewarded(tiny_tokenizer: Any) -> None:
    text = {"answer": "4", TEXT_PROMPT: True}

    def plain(prompts: Any, completions: Any, **columns: Any) -> Any:
        assert (prompts, completions, columns["answer"]) == (["task"], ["four"], ["4"])
        return torch.tensor([0.25])

    made = RewardFunctions([plain], [1.0])
    group = rewarded(made, tiny_tokenizer, text, ["four", EngineError("lost")])
    assert (group[0].steps[0].reward, group[1].failure) == (0.25, "lost")
    (failed,) = rewarded(made, tiny_tokenizer, text, [EngineError("lost")])
    assert failed.failure == "lost"


def test_functions_that_fail_are_called_again_and_fail_their_group(tiny_tokenizer: Any) -> None:
    calls: list[int] = []

    def flaky(completions: Any, **columns: Any) -> list[float]:
        calls.append(len(completions))
        if len(calls) == 1:
            raise OSError("the judge is busy")
        return [1.0] * len(completions)

    group = rewarded(RewardFunctions([flaky], [1.0]), tiny_tokenizer, {}, ["5", "6"])
    assert (calls, rewards_of(group)) == ([2, 2], [1.0, 1.0])
    for function, wanted in (
        (lambda **columns: 1.0, r"'<lambda>': expected a list of 2 rewards.* got 1\.0"),
        (
            lambda **columns: [1.0],
            r"expected a list of 2 rewards, one for each answer of the group",
        ),
        *(
            (lambda value=value, **columns: [1.0, value], "expected a finite float32 number, got ")
            for value in (float("inf"), float("nan"), 1e39, 10**400, "high")
        ),
        (lambda log_metric, **columns: log_metric("reward_<lambda>", 1.0) or [1.0, 2.0], "another"),
    ):
        group = rewarded(RewardFunctions([function], [1.0]), tiny_tokenizer, {}, ["5", "6"])
        for trajectory in group:
            assert re.search(wanted, trajectory.failure or "")
            assert trajectory.stop_reason == "env_error"
            assert trajectory.steps_or_placeholder()[0].reward == 0.0


class Constant:
    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, completions: Any, **columns: Any) -> list[float]:
        return [self.value] * len(completions)


def constant(completions: Any, value: float, **columns: Any) -> list[float]:
    return [value] * len(completions)


def test_each_reward_function_has_a_metric_of_its_own(tiny_tokenizer: Any) -> None:
    def constant_2(completions: Any, **columns: Any) -> list[float]:
        return [6.0] * len(completions)

    functions = [partial(constant, value=1.0), partial(constant, value=2.0), constant_2]
    made = RewardFunctions([*functions, Constant(3.0), Constant(4.0), short], [1.0] * 6)
    (one,) = rewarded(made, tiny_tokenizer, {}, ["5"])
    assert one.env_metrics == {
        "reward_constant_1": 1.0, "reward_constant_3": 2.0, "reward_constant_2": 6.0,
        "reward_Constant_1": 3.0, "reward_Constant_2": 4.0, "reward_short": -1.0,
    }  # fmt: skip
    assert one.steps[0].reward == 15.0
    made = RewardFunctions([Constant(3e38)], [2.0])
    (failed,) = rewarded(made, tiny_tokenizer, {}, ["5"])
    assert "the sum of weighted rewards: expected a finite" in str(failed.failure)


def test_reward_functions_are_one_argument_of_train(folder: Path) -> None:
    recorder = Recorder()
    config = settings(folder, "funcs", "trainer.epochs=1")
    skyrl_fast.train_agent(
        config, reward_funcs=[short, exact], prompts=["3"] * 4, make_rollouts=recorder
    )
    assert recorder.rollouts[-1].config.environment.env_class == "RewardFunctions"
    for options, wanted in (
        ({"reward_funcs": [], "reward_weights": []}, "got 0 functions and 0 weights"),
        ({"reward_funcs": short, "reward_weights": [1.0, 2.0]}, "got 1 functions and 2 weights"),
        ({"reward_funcs": ["org/model"]}, "expected functions, got 'org/model'"),
        ({"reward_weights": [1.0]}, "reward_weights: expected reward_funcs"),
        ({"reward_funcs": short, "reward": len}, "expected one of env, reward, reward_funcs"),
    ):
        with pytest.raises(SetupError, match=wanted):
            skyrl_fast.train_agent(settings(folder, "other"), **options)


def test_invalid_and_conflicting_objects(folder: Path) -> None:
    config = settings(folder, "run")
    with pytest.raises(SetupError, match="expected one of env, reward, reward_funcs and agent"):
        skyrl_fast.train_agent(config, env="m:E", reward=len)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="reward: expected a class or function, got 3"):
        skyrl_fast.train_agent(config, reward=3)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="reward: expected a class or function, got 'm:f'"):
        skyrl_fast.train_agent(config, reward="m:f")  # type: ignore[arg-type]
    for callbacks in (Callback(), [len]):
        with pytest.raises(SetupError, match="callbacks: expected a list of Callback, got"):
            skyrl_fast.train_agent(config, callbacks=callbacks)  # type: ignore[arg-type]


async def solve(task: Any) -> float:
    return 1.0


@pytest.mark.spec("gateway.agents")
def test_given_agent_is_named_in_the_settings(folder: Path) -> None:
    recorder = Recorder()
    for number, agent in enumerate((solve, f"{__name__}:solve")):
        config = settings(folder, f"agent{number}", "trainer.epochs=1")
        skyrl_fast.train_agent(config, agent=agent, make_rollouts=recorder)
        assert recorder.rollouts[-1].config.agent.function == f"{__name__}:solve"
    config = settings(folder, "other")
    with pytest.raises(SetupError, match="expected one of env, reward, reward_funcs and agent"):
        skyrl_fast.train_agent(config, agent=solve, reward=len)  # type: ignore[arg-type]
    config = settings(folder, "other", f"agent.function={__name__}:solve")
    for given in ({"reward": len}, {"reward_funcs": short}, {"env": "m:E"}):
        with pytest.raises(SetupError, match=r"expected no env, reward .* with the agent of the"):
            skyrl_fast.train_agent(config, **given)
    with pytest.raises(SetupError, match="agent: expected a function of a module, got <function"):
        skyrl_fast.train_agent(config, agent=lambda task: 1.0)


def test_given_environment_applies_to_every_row(folder: Path) -> None:
    def lucky(answer: str, row: dict[str, Any]) -> float:
        return 1.0

    recorder = Recorder()
    rows = [{"prompt": "4", "env_class": "other"}, {"prompt": "5"}] * 2
    config = settings(folder, "run", "trainer.epochs=1")
    skyrl_fast.train_agent(config, prompts=rows, reward=lucky, make_rollouts=recorder)
    assert recorder.rollouts[0].config.environment.env_class == "lucky"
    assert config.environment.env_class == "gsm8k"  # the caller's object is unchanged
    skyrl_fast.train_agent(
        settings(folder, "b", "trainer.epochs=1"), env="m:E", make_rollouts=recorder
    )
    assert recorder.rollouts[1].config.environment.env_class == "m:E"


def test_losses_and_estimators_by_object_or_name(folder: Path) -> None:
    recorder = Recorder()
    config = settings(folder, "a", "trainer.epochs=1")
    skyrl_fast.train_agent(config, loss="gspo", estimator="rloo", make_rollouts=recorder)
    algorithm = recorder.rollouts[0].config.trainer.algorithm
    assert (algorithm.policy_loss_type, algorithm.advantage_estimator) == ("gspo", "rloo")
    if not hasattr(skyrl_fast, "register_policy_loss"):
        pytest.skip("functions cannot be registered")
    calls: list[str] = []

    def reinforce(inputs: Any) -> Any:
        calls.append("loss")
        return -inputs.advantages * inputs.logprobs

    def centred(inputs: Any) -> Any:
        calls.append("estimator")
        return inputs.rewards - inputs.rewards.mean()

    config = settings(folder, "b", "trainer.epochs=1")
    result = skyrl_fast.train_agent(
        config, loss=reinforce, estimator=centred, make_rollouts=recorder
    )
    algorithm = recorder.rollouts[1].config.trainer.algorithm
    assert (algorithm.policy_loss_type, algorithm.advantage_estimator) == ("reinforce", "centred")
    assert result.step == 2 and set(calls) == {"loss", "estimator"}


# --- callbacks and signals ---------------------------------------------------------------------


class Stop(Callback):
    def __init__(self, event: str, step: int) -> None:
        self.event, self.step = event, step

    def on_step(self, step: int, metrics: Mapping[str, float]) -> bool:
        return (self.event, self.step) == ("step", step)

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> bool:
        return (self.event, self.step) == ("eval", step)


@pytest.mark.parametrize(
    ("event", "step", "reached", "stopped_by"),
    [
        ("eval", 0, 0, "Stop"),
        ("step", 1, 1, "Stop"),
        ("eval", 2, 2, "Stop"),
        ("step", 6, 6, None),  # the last step
    ],
)
def test_callbacks_end_a_run_with_a_checkpoint(
    folder: Path, event: str, step: int, reached: int, stopped_by: str | None
) -> None:
    result = skyrl_fast.train_agent(
        settings(folder, "run"), callbacks=[Stop(event, step)], make_rollouts=Recorder()
    )
    assert (result.step, result.total_steps) == (reached, 6)
    assert (result.stopped_by, result.signal) == (stopped_by, None)
    assert result.checkpoint is not None
    assert read_state(result.checkpoint)["step"] == reached
    resumed = skyrl_fast.train_agent(
        settings(folder, "run", "trainer.resume_mode=latest"), make_rollouts=Recorder()
    )
    assert resumed.step == 6
    assert [row["step"] for row in read_metrics(resumed.metrics)] == list(range(7))


class Broken(Callback):
    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 3:
            raise KeyError("reward/nothing")


def test_exception_in_a_callback_ends_the_run_after_a_checkpoint(folder: Path) -> None:
    wanted = "callback Broken.on_step raised KeyError: 'reward/nothing'"
    with pytest.raises(CallbackError, match=wanted):
        skyrl_fast.train_agent(
            settings(folder, "run"), callbacks=[Callback(), Broken()], make_rollouts=Recorder()
        )
    assert (folder / "run/checkpoints/step_000003/state.json").is_file()


class Interrupt(Callback):
    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.thread = threading.current_thread()
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_interrupt_leaves_a_checkpoint_in_scripts_and_notebooks(
    folder: Path, in_a_loop: bool
) -> None:
    callback = Interrupt()
    before = signal.getsignal(signal.SIGINT)

    def run() -> Any:
        return skyrl_fast.train_agent(
            settings(folder, "run"), callbacks=[callback], make_rollouts=Recorder()
        )

    async def cell() -> Any:
        return run()

    result = asyncio.run(cell()) if in_a_loop else run()
    assert (result.signal, result.stopped_by) == (signal.SIGINT, None)
    assert 2 <= result.step < 6
    assert json.loads((result.checkpoint / "state.json").read_text())["step"] == result.step
    assert (callback.thread is threading.main_thread()) == (not in_a_loop)
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize(("number", "error"), [(2, KeyboardInterrupt), (15, SystemExit)])
@pytest.mark.parametrize("in_a_loop", [False, True])
def test_signal_before_training_ends_the_start(
    folder: Path, number: int, error: type[BaseException], in_a_loop: bool
) -> None:
    async def start(*_: Any) -> Any:
        os.kill(os.getpid(), number)
        await asyncio.sleep(60)

    async def cell() -> None:
        run()

    def run() -> None:
        with pytest.raises(error):
            skyrl_fast.train_agent(settings(folder, "run"), make_rollouts=start)

    asyncio.run(cell()) if in_a_loop else run()


def test_train_runs_in_threads_without_signal_handlers(folder: Path) -> None:
    results: list[Any] = []

    def run() -> None:
        config = settings(folder, "run", "trainer.epochs=1")
        results.append(skyrl_fast.train_agent(config, make_rollouts=Recorder()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert results[0].step == 2
