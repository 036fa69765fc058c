"""Several policies of one base: each learns from its own steps only, and is saved and resumed."""

import copy
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("peft")

import peft
from _fakes import FakeRollouts, FakeTokenizer, start_of, tiny_model
from _rows import assert_same, full_logprobs, mixed_batch
from _settings import NEEDED, error_of
from _training import RESUME, assert_same_files, dies_at, dying, settings, steady
from _training import folder as folder  # a fixture
from safetensors.torch import load_file

import skyrl_fast
from skyrl_fast import cli
from skyrl_fast.batch import StepBatch
from skyrl_fast.config import AlgorithmConfig, Config, OptimizerConfig, load_config
from skyrl_fast.config.settings import REFERENCE, LoraConfig
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.train import evaluation
from skyrl_fast.train.algorithm.policies import split_by_policy
from skyrl_fast.train.data.prompts import Prompt
from skyrl_fast.train.model.lora import adapter_of, add_adapters
from skyrl_fast.train.model.optimizer import Optimizer
from skyrl_fast.train.model.policy import Policy, WithoutAdapter
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.prepare_batch import training_batch, with_advantages
from skyrl_fast.train.run import TrainResult
from skyrl_fast.train.setup.errors import SetupError
from skyrl_fast.train.supervised import sft
from skyrl_fast.train.update import accumulate_gradient, update_policy
from skyrl_fast.trajectory_store.recorded import read_recorded

NAMES = ("planner", "worker")
LORA = LoraConfig(rank=3, alpha=4, policies=list(NAMES))
KEY = "trainer.policy.model.lora"
RUN = [f"{KEY}.rank=4", f"{KEY}.policies=[planner,worker]", "generator.max_turns=3"]


def make_policy(*, dtype: torch.dtype = torch.float32) -> Policy:
    """Return a policy with two adapters, whose B are not 0."""
    model = tiny_model().to(dtype)
    torch.manual_seed(0)
    add_adapters(model, LORA, base="base")
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return Policy(model)


def matrices(policy: Policy, name: str) -> dict[str, torch.Tensor]:
    return {n: p for n, p in policy.model.named_parameters() if adapter_of(n) == name}


def gradient_of(policy: Policy, name: str, batch: Any) -> dict[str, torch.Tensor | None]:
    """Return the gradients of all matrices after a mini-batch of one policy."""
    policy.model.zero_grad(set_to_none=True)
    accumulate_gradient(policy.with_adapter(name), batch, algorithm=AlgorithmConfig())
    return {
        n: None if p.grad is None else p.grad.clone()
        for n, p in policy.model.named_parameters()
        if adapter_of(n) is not None
    }


def test_a_gradient_is_of_one_policy_only() -> None:
    policy, batch = make_policy(), mixed_batch()
    for name in NAMES:
        assert len(matrices(policy, name)) == 2 * 7 * policy.model.config.num_hidden_layers
        gradient = gradient_of(policy, name, batch)
        assert all((value is None) == (adapter_of(n) != name) for n, value in gradient.items())
        assert any(bool(value.any()) for value in gradient.values() if value is not None)
        alone = tiny_model()
        torch.manual_seed(0)
        add_adapters(alone, replace(LORA, policies=[name]), base="base")
        alone.load_state_dict(matrices(policy, name), strict=False)
        expected = gradient_of(Policy(alone), name, batch)
        for n, value in expected.items():
            assert torch.equal(gradient[n], value)  # the same products in the same order


def test_an_update_of_one_policy_leaves_the_others_bits() -> None:
    policy, batch = make_policy(), mixed_batch()
    before = {name: policy.with_adapter(name).batch_logprobs(batch) for name in NAMES}
    base = WithoutAdapter(policy).batch_logprobs(batch)
    assert not torch.equal(before["planner"], before["worker"])
    planner = policy.with_adapter("planner")
    optimizer = Optimizer(planner, OptimizerConfig(lr=0.1), total_steps=1)
    weights = {n: p.detach().clone() for n, p in matrices(policy, "worker").items()}
    update_policy(planner, optimizer, batch, algorithm=AlgorithmConfig(), mini_batch_size=2)
    assert not torch.equal(planner.batch_logprobs(batch), before["planner"])
    assert torch.equal(policy.with_adapter("worker").batch_logprobs(batch), before["worker"])
    assert all(torch.equal(p, weights[n]) for n, p in matrices(policy, "worker").items())
    assert torch.equal(WithoutAdapter(policy).batch_logprobs(batch), base)
    assert torch.equal(base, Policy(tiny_model()).batch_logprobs(batch))


def test_names_of_a_models_parts_are_names_of_policies() -> None:
    model, names = tiny_model(), ["0", "layers", "lora_A"]
    add_adapters(model, replace(LORA, policies=names), base="base")
    policy = Policy(model)
    matrices_of_first = [n.removesuffix(".0.weight") for n in matrices(policy, "0")]
    expected = {f"base_model.model.{name}.weight" for name in matrices_of_first}
    sent = dict(policy.named_weights(adapter=True))
    assert sent.keys() == {f"{name}:{matrix}" for name in names for matrix in expected}


def step(policy: str | None, reward: float = 0.0, token: int = 5, stop: str = "stop") -> Step:
    return Step([1, 4], [token], [1], [-1.0], reward, stop, 0, "", "", 0.0, 0.0, policy=policy)


def trajectory(uid: str, repetition: int, *steps: Step, **options: Any) -> Trajectory:
    return Trajectory(uid, repetition, list(steps), "length", "e", {}, 0.0, **options)


def rewards(trajectories: Sequence[Trajectory]) -> list[list[float]]:
    return [[step.reward for step in one.steps] for one in trajectories]


def test_each_policy_gets_its_steps_and_the_outcome() -> None:
    group = [
        trajectory("a", 0, step("planner"), step("worker", 0.25), step("planner", 1.0)),
        trajectory("a", 1, step("planner", stop="x"), step(REFERENCE), step("worker", 0.5)),
        trajectory("a", 2, step("planner"), step(REFERENCE, 2.0)),
        trajectory("b", 0, step("planner", 3.0), failure="it broke"),
        trajectory("c", 0, step("planner", 1.0)),
    ]
    parts = split_by_policy(group, [*NAMES, "judge"])
    assert list(parts) == ["planner", "worker"]  # the judge made no call
    assert rewards(parts["planner"]) == [[0.0, 1.0], [0.5], [2.0], [3.0], [1.0]]
    # The third trajectory of the first prompt is no sample; the last prompt keeps its place.
    assert [(t.uid, t.repetition_id) for t in parts["worker"]] == [
        *(("a", 0), ("a", 1), ("b", 0), ("c", 0))
    ]
    assert rewards(parts["worker"]) == [[1.25], [0.5], [], []]
    assert [t.stop_reason for t in parts["planner"][:2]] == ["length", "length"]
    assert parts["worker"][2].failure == "it broke"
    assert rewards(group)[0] == [0.0, 0.25, 1.0]  # as they were


def test_rewards_by_name_replace_the_outcome() -> None:
    steps = [step("planner"), step("worker", 0.25), step("planner", 1.0)]
    parts = split_by_policy(
        [trajectory("a", 0, *steps, policy_rewards={"planner": 0.5, "worker": 2.0})], NAMES
    )
    assert rewards(parts["planner"]) == [[0.0, 0.5]] and rewards(parts["worker"]) == [[2.25]]


class TwoPolicies(FakeRollouts):
    """The planner says a word, the worker another one, the reference a third.

    The policies that have rewards have them for a word of their own.
    """

    words: ClassVar[dict[str, int]] = {"planner": 10, "worker": 11}

    def __init__(self, config: Config, rewarded: tuple[str, ...] = NAMES) -> None:
        super().__init__(config, tiny_model(seed=1))
        self.models: dict[str, Any] = {REFERENCE: tiny_model()}
        self.rewarded = rewarded

    async def update_weights(self, policy: Policy, *, version: int) -> dict[str, float]:
        for name in NAMES:
            model = copy.deepcopy(self.model)
            weights = dict(policy.with_adapter(name).named_weights())
            model.load_state_dict(weights, strict=False)  # tied weights occur once
            self.models[name] = model
        self.version = version
        return {}

    def build_trajectory(
        self, prompt: Prompt, repetition: int, phase: str, turns: Any
    ) -> Trajectory:
        seed = f"{self.config.trainer.seed} {self.version} {phase} {prompt.uid} {repetition}"
        generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
        context = start_of(prompt)
        steps, said = [], {}
        for name in (*NAMES, REFERENCE):
            self.model = self.models[name]
            values = self._logprobs([tuple(context)])[tuple(context)]
            token = int(torch.multinomial(values.exp(), 1, generator=generator))
            said[name] = token
            one = step(name, token=token)
            steps.append(
                replace(
                    one,
                    prompt_token_ids=list(context),
                    rollout_logprobs=[float(values[token])],
                    policy_version=self.version,
                )
            )
            context = [*context, token, 3]
        right = {name: float(said[name] == word) for name, word in self.words.items()}
        steps[-1].reward = sum(right.values()) / 2
        own = {name: right[name] if name in self.rewarded else 0.0 for name in NAMES}
        return Trajectory(
            prompt.uid, repetition, steps, "stop", "fake", {}, 0.1, phase=phase, policy_rewards=own
        )


def train(config: Config, during: Any = None, rewarded: tuple[str, ...] = NAMES) -> TrainResult:
    async def make(config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        class Watched(TwoPolicies):
            async def before_batch(self, step: int, phase: str) -> None:
                if during is not None and phase == "train":
                    await during(step)

        return Watched(config, rewarded)

    return skyrl_fast.train_agent(config, make_rollouts=make)


def adapter(outcome: TrainResult, name: str) -> dict[str, torch.Tensor]:
    return load_file(outcome.checkpoint / "policy" / name / "adapter_model.safetensors")


def test_each_policy_learns_from_its_rewards(folder: Path) -> None:
    """Without rewards of its own the worker does not move, while the planner learns."""
    more = ["trainer.epochs=12", "trainer.ckpt_interval=-1", "trainer.eval_interval=-1"]
    more.append("trainer.policy.optimizer_config.lr=0.02")
    outcome = train(settings(folder, "both", *RUN, *more))
    rows = steady(outcome.metrics)
    key = "{}/reward/avg_raw_reward"
    for name in NAMES:
        curve = [row[key.format(name)] for row in rows if key.format(name) in row]
        assert len(curve) == 24
        print(name, [round(value, 2) for value in curve])
        assert sum(curve[-4:]) / 4 > sum(curve[:4]) / 4 + 0.3  # of 0.1 by chance and 1
        assert rows[-1][f"{name}/policy/optimizer_steps"] == 2
    alone = train(settings(folder, "planner", *RUN, *more), rewarded=("planner",))
    rows = steady(alone.metrics)
    assert rows[-1]["worker/policy/grad_norm"] == 0
    assert rows[-1][key.format("planner")] > rows[1][key.format("planner")] + 0.3
    # Neither trained by rewards nor by a gradient: B is what it was at the start.
    assert not any(value.any() for n, value in adapter(alone, "worker").items() if "lora_B" in n)
    assert any(value.any() for n, value in adapter(alone, "planner").items() if "lora_B" in n)
    # The frozen name was sampled, is stored, and is in no row.
    (first, *_) = read_recorded(alone.run_path)
    assert [step.policy for step in first.steps] == [*NAMES, REFERENCE]


def test_a_batch_of_the_reference_alone_is_warned_of(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class OfReference(TwoPolicies):
        def build_trajectory(self, *arguments: Any) -> Trajectory:
            one = super().build_trajectory(*arguments)
            return replace(one, steps=[replace(step, policy=REFERENCE) for step in one.steps])

    async def make(config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        return OfReference(config)

    config = settings(folder, "run", *RUN, "trainer.max_training_steps=1")
    assert skyrl_fast.train_agent(config, make_rollouts=make).step == 1
    assert "no policy was called for this batch" in caplog.text


@pytest.mark.spec("evaluate.policies")
def test_a_run_of_policies_and_its_model_are_evaluated_under_their_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def make(config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        return TwoPolicies(config)

    config = settings(folder, "run", *RUN)
    run = train(config)
    monkeypatch.setattr(evaluation, "load_tokenizer", lambda path: FakeTokenizer())
    targets = [folder / "model", folder / "run"]
    found = evaluation.evaluate(config, targets, out=folder / "out", make_rollouts=make)
    reported = {row["step"]: row for row in read_metrics(run.metrics)}
    for one, step in zip(found, (0, run.step), strict=True):
        expected = {n: value for n, value in reported[step].items() if n.startswith("eval/")}
        assert expected.keys() <= one.metrics.keys()
        assert {name: one.metrics[name] for name in expected} == expected
    assert found[0].scores != found[1].scores
    # With no target it is the model of the settings.
    (alone,) = evaluation.evaluate(config, out=folder / "alone", make_rollouts=make)
    assert alone.scores == found[0].scores


@pytest.mark.spec("evaluate.policies")
@pytest.mark.parametrize("target", ["http://127.0.0.1:1", "adapter"])
def test_one_policy_is_no_evaluation_of_several(folder: Path, target: str) -> None:
    run = train(settings(folder, "run", *RUN))
    assert run.checkpoint is not None
    given = str(run.checkpoint / "policy" / "planner") if target == "adapter" else target
    expected = "the settings name the policies planner, worker, got an? (adapter|server)"
    with pytest.raises(SetupError, match=expected):
        evaluation.evaluate(settings(folder, "other", *RUN), [given], out=folder / "out")
    assert not (folder / "out").exists()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_has_all_adapters_and_optimizers(folder: Path, ranks: int) -> None:
    more = [
        *RUN,
        "trainer.algorithm.use_kl_loss=true",
        f"trainer.placement.policy_num_gpus_per_node={ranks}",
    ]
    expected = train(settings(folder, "expected", *more))
    with dying():
        train(settings(folder, "broken", *more), dies_at(5))
    outcome = train(settings(folder, "broken", RESUME, *more))
    # A step after a start has the traffic of the first weight sync, too.
    assert steady(outcome.metrics, "traffic/") == steady(expected.metrics, "traffic/")
    files = [path.relative_to(expected.checkpoint) for path in expected.checkpoint.rglob("*.safe*")]
    assert len(files) == 1 + 2 + 2 * ranks  # random state; per policy an adapter, its moments
    assert_same_files(outcome, expected, *files)
    assert not torch.equal(*(next(iter(adapter(expected, n).values())) for n in NAMES))


async def three_roles(task: Any) -> dict[str, Any]:
    """Reward letters of the planner's answer, digits of the worker's; the reference is asked."""
    said = {}
    for name in (*NAMES, REFERENCE):
        answer = await task.async_openai.chat.completions.create(
            model=name, messages=task.row["prompt"]
        )
        said[name] = answer.choices[0].message.content or " "
    shares = {
        "planner": sum(map(str.isalpha, said["planner"])) / len(said["planner"]),
        "worker": sum(map(str.isdigit, said["worker"])) / len(said["worker"]),
    }
    return {"reward": sum(shares.values()), "policy_rewards": shares}


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_roles_of_an_agent_are_trained_through_the_gateway(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": f"say {word}"} for word in ("sun", "moon", "rain", "snow")]
    outcome = skyrl_fast.train_agent(
        {
            f"{KEY}.rank": 8,
            f"{KEY}.policies": list(NAMES),
            "trainer.policy.model.path": tiny_model_folder,
            "trainer.policy.optimizer_config.lr": 0.01,
            "trainer.run_path": tmp_path / "run",
            "trainer.train_batch_size": 4,
            "trainer.policy_mini_batch_size": 4,
            "trainer.epochs": 4,
            "trainer.logger": ["jsonl"],
            "trainer.plot": False,
            "generator.n_samples_per_prompt": 8,
            "generator.max_turns": 3,
            "generator.sampling_params.max_generate_length": 6,
            "generator.max_input_length": 300,
        },
        prompts=rows,
        agent=three_roles,
    )
    steps = steady(outcome.metrics)
    assert outcome.step == 4
    for name in NAMES:
        assert max(row[f"{name}/policy/grad_norm"] for row in steps) > 0
        assert any(value.any() for n, value in adapter(outcome, name).items() if "lora_B" in n)
    assert all(row["sync/logprob_change_max"] > 0 for row in steps)  # each update was verified
    first, *_ = read_recorded(outcome.run_path)
    assert [call.model for call in first.other_calls] == [REFERENCE]
    assert {step.policy for step in first.steps} == set(NAMES)


def test_rows_of_one_policy_do_not_change_anothers_batch() -> None:
    config = load_config(None, [*NEEDED, *RUN])

    def batch_of_planner(reward: float, token: int) -> StepBatch:
        trajectories = [
            trajectory(
                uid,
                repetition,
                step("planner", float(repetition)),
                step("worker", reward * repetition, token),
                policy_rewards={"planner": float(repetition % 2)},
            )
            for uid in "ab"
            for repetition in range(3)
        ]
        batch, units, _ = training_batch(split_by_policy(trajectories, NAMES)["planner"], config)
        policy = make_policy().with_adapter("planner")
        options = {"policy": policy, "reference": None, "critic": None, "kl_coef": 0.0}
        return with_advantages(batch, units, config.trainer.algorithm, **options)[0]

    one, other = batch_of_planner(1.0, 5), batch_of_planner(9.0, 7)
    assert_same(one, other)
    assert one.advantages is not None and bool(one.advantages.any())


def test_an_asynchronous_run_trains_all_policies(folder: Path) -> None:
    outcome = train(
        settings(
            folder,
            "run",
            *RUN,
            "trainer.fully_async.enabled=true",
            "trainer.fully_async.max_staleness_steps=1",
        )
    )
    last = steady(outcome.metrics)[-1]
    assert outcome.step == 6
    assert all(last[f"{name}/policy/optimizer_steps"] == 2 for name in NAMES)


def test_a_policy_is_exported_and_continued(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = train(settings(folder, "run", *RUN))
    out, run = folder / "out", str(outcome.run_path)
    command = ["export", run, str(out), "--to", "adapter"]
    assert cli.main(command) == 2
    assert "--policy: expected one of planner, worker, got none" in capsys.readouterr().err
    assert cli.main([*command, "--policy", "judge"]) == 2
    assert "expected one of planner, worker, got judge" in capsys.readouterr().err
    assert cli.main(["export", run, str(out), "--to", "batch"]) == 2
    assert "expected trajectories of one policy" in capsys.readouterr().err
    assert cli.main([*command, "--policy", "worker"]) == 0
    loaded = peft.PeftModel.from_pretrained(tiny_model(), str(out))
    model = tiny_model()
    lora = LoraConfig(rank=4, policies=list(NAMES))
    add_adapters(model, lora, base="", folder=outcome.checkpoint / "policy")
    batch = mixed_batch()
    with torch.no_grad():
        expected = full_logprobs(loaded, batch) * batch.loss_mask
    policy = Policy(model)
    worker = policy.with_adapter("worker").batch_logprobs(batch)
    # one order of sums is the model's, the other that of rows packed together
    torch.testing.assert_close(worker, expected, atol=2e-5, rtol=0)
    assert not torch.allclose(policy.batch_logprobs(batch), expected, atol=1e-3)
    path = f"{KEY}.path={outcome.checkpoint}/policy"
    again = train(settings(folder, "again", *RUN, path, "trainer.policy.optimizer_config.lr=0"))
    for name in NAMES:
        one, two = adapter(outcome, name), adapter(again, name)
        assert all(torch.equal(one[n], two[n]) for n in one)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{KEY}.policies=[a,b]"], f"{KEY}.rank: expected more than 0 with {KEY}.policies=["),
        ([f"{KEY}.policies=[a,a]", f"{KEY}.rank=4"], "expected different names"),
        ([f"{KEY}.policies=[a/b]", f"{KEY}.rank=4"], "expected different names of letters"),
        ([f"{KEY}.policies=[reference]", f"{KEY}.rank=4"], "expected another name than reference"),
        ([f"{KEY}.policies=[training]", f"{KEY}.rank=4"], "expected another name than training"),
        ([*RUN, "trainer.placement.colocate_all=false"], f"{KEY}.policies: expected [] with"),
        ([*RUN, f"{KEY}.weight_sync=merged"], f"{KEY}.policies: expected [] with"),
        (
            [
                *RUN,
                "generator.inference_engine.run_engines_locally=false",
                "generator.inference_engine.external_server_urls=[http://a:1]",
            ],
            f"{KEY}.policies: expected [] with",
        ),
        (
            [*RUN, "trainer.critic.model.path=critic"],
            "policies: expected [] with trainer.critic.mod",
        ),
        (
            [*RUN, "agent.function=a:b", "agent.untrained_models=[worker]"],
            "agent.untrained_models: expected other names",
        ),
        (
            [*RUN, "agent.function=a:b", "agent.upstreams={worker: {base_url: http://a/v1}}"],
            "agent.upstreams: expected other names",
        ),
        (
            [*RUN, "agent.function=a:b", "agent.upstreams={reference: {base_url: http://a/v1}}"],
            "agent.upstreams: expected another name than reference",
        ),
        (
            ["agent.function=a:b", "agent.untrained_models=[policy]"],
            "agent.untrained_models: expected other names than agent.model",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused(overrides: list[str], message: str) -> None:
    assert message in error_of(*overrides)


def test_demonstrations_of_several_policies_are_refused() -> None:
    config = load_config(None, [*NEEDED, *RUN])
    with pytest.raises(SetupError, match="expected none for demonstrations"):
        sft(config, demonstrations=[])
