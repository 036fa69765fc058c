"""Distillation in a step: what teachers are asked, the term of the loss, runs with teachers."""

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _fakes import FakeRollouts, make_prompts, tiny_model
from _teachers import ModelEngine, teachers_of
from _training import Recorder, settings
from _training import folder as folder  # a fixture

from skyrl_fast.batch import batch_from_trajectories
from skyrl_fast.config import AlgorithmConfig, ConfigError, as_config, check_config
from skyrl_fast.config.distillation import DistillationConfig
from skyrl_fast.ops.logprob.gathered import gathered_logprob
from skyrl_fast.rollout.engine.protocol import EngineDeadError
from skyrl_fast.rollout.teachers import Teacher, Teachers
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.train.algorithm.distillation import (
    distillation_metrics,
    top_k_kl,
    with_teacher_logprobs,
)
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.output.metric_table import METRICS, TEACHERS
from skyrl_fast.train.run import RunParts, RunRequest, run_request
from skyrl_fast.train.setup.given_objects import GivenObjects
from skyrl_fast.train.update import accumulate_gradient

A = "trainer.algorithm"
DISTILLATION = f"{A}.distillation"


def step(prompt: list[int], response: list[int], *, trained: int = 1) -> Step:
    return Step(
        prompt_token_ids=prompt,
        response_ids=response,
        loss_mask=[trained] * len(response),
        rollout_logprobs=[-1.0] * len(response),
        reward=0.0,
        stop_reason="stop",
        policy_version=0,
        text="",
        observation="",
        llm_seconds=0.0,
        env_seconds=0.0,
    )


def trajectory(uid: str, source: str | None, *steps: Step) -> Trajectory:
    return Trajectory(
        uid=uid,
        repetition_id=0,
        steps=list(steps),
        stop_reason="stop",
        env_class="fake",
        env_metrics={},
        seconds=0.0,
        phase="train",
        data_source=source,
    )


# Of the first, two turns of one context and one of another; the second has no teacher.
SAMPLES = [
    trajectory(
        "a",
        "math",
        step([1, 4], [5, 6]),
        step([1, 4, 5, 6, 3], [7]),
        step([1, 9], [8, 8]),
    ),
    trajectory("b", "code", step([1, 5], [5])),
    trajectory("c", "math", step([1, 6], [4], trained=0)),
]


def teacher_of_model(seed: int, *, top_k: int = 0) -> tuple[Teachers, ModelEngine]:
    engine: Any = ModelEngine(tiny_model(seed).double())
    teacher = Teacher(f"{DISTILLATION}.teachers.math", engine, top_k=top_k)
    return Teachers({"math": "m"}, {"m": teacher}), engine


@pytest.mark.spec("distill.rows")
def test_each_context_is_scored_once_and_rows_without_a_trained_token_are_not() -> None:
    teachers, engine = teacher_of_model(1)
    batch = batch_from_trajectories(SAMPLES)
    scored, metrics = asyncio.run(with_teacher_logprobs(batch, SAMPLES, teachers))
    assert sorted(engine.scored) == [[1, 4, 5, 6, 3, 7], [1, 9, 8, 8]]
    assert metrics == {"distillation/teacher_tokens": 10.0}
    expected = []
    for one in SAMPLES[0].steps:
        ids = torch.tensor([[*one.prompt_token_ids, *one.response_ids]])
        with torch.no_grad():
            logprobs = engine.model(ids).logits[0, :-1].log_softmax(-1)
        of_row = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        expected += of_row[-len(one.response_ids) :].tolist()
    assert scored.teacher_logprobs is not None
    values = scored.teacher_logprobs.tolist()
    assert values[: len(expected)] == pytest.approx(expected, abs=1e-6)
    assert np.isnan(values[len(expected) :]).all()  # of another source, and of an untrained row


def test_ids_that_only_the_teacher_has_are_none_of_the_likely_tokens() -> None:
    teachers, _ = teacher_of_model(1, top_k=16)
    batch = batch_from_trajectories(SAMPLES)
    work = with_teacher_logprobs(batch, SAMPLES, teachers, top_k=16, vocab_size=12)
    batch, _ = asyncio.run(work)
    assert batch.teacher_ids is not None and batch.teacher_top_logprobs is not None
    assert int(batch.teacher_ids.max()) == 11
    is_left_out = batch.teacher_top_logprobs[:5] == -torch.inf
    assert is_left_out.sum(-1).tolist() == [4] * 5


@pytest.mark.spec("distill.sampled", "distill.by-source")
def test_the_term_is_half_the_square_over_rows_with_a_teacher() -> None:
    teachers, engine = teacher_of_model(1)
    batch = batch_from_trajectories(SAMPLES)
    batch, _ = asyncio.run(with_teacher_logprobs(batch, SAMPLES, teachers))
    batch = batch.with_(advantages=torch.zeros(batch.loss_mask.shape))
    model = tiny_model(dtype=torch.float64)
    algorithm = AlgorithmConfig(
        policy_loss_coef=0.0,
        distillation=DistillationConfig(teachers={"math": "m"}, coef=0.5),
    )
    metrics = accumulate_gradient(Policy(model), batch, algorithm=algorithm)
    found = torch.cat([p.grad.flatten() for p in model.parameters()])

    plain = tiny_model(dtype=torch.float64)
    terms = []
    for one in SAMPLES[0].steps:
        ids = torch.tensor([[*one.prompt_token_ids, *one.response_ids]])
        count = len(one.response_ids)
        own = plain(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[-count:, 0]
        with torch.no_grad():
            of_teacher = engine.model(ids).logits[0, :-1].log_softmax(-1)
        terms.append((own - of_teacher.gather(1, ids[0, 1:, None])[-count:, 0]) ** 2 / 2)
    term = torch.cat(terms).sum() / 6  # the row without a teacher has the sixth trained token
    (0.5 * term).backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters()])
    # Teachers return float32.
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)
    assert metrics["policy/distillation_loss"] == pytest.approx(term.item(), abs=1e-6)
    assert metrics["policy/loss"] == pytest.approx(0.5 * term.item(), abs=1e-6)


# --- the KL over likely tokens -------------------------------------------------------------------


def kl_by_hand(own: list[float], teacher: list[float]) -> float:
    return sum(q * math.log(q / p) for q, p in zip(own, teacher, strict=True))


@pytest.mark.spec("distill.top-k")
def test_all_other_tokens_are_one_category() -> None:
    own = [0.5, 0.2, 0.3]  # the last of two tokens
    teacher = [0.6, 0.3, 0.1]
    of_policy = torch.tensor([own[:2]]).log()
    of_teacher = torch.tensor([teacher[:2]]).log()
    reverse = top_k_kl(of_policy, of_teacher, direction="reverse")
    assert reverse.item() == pytest.approx(kl_by_hand(own, teacher), abs=1e-6)
    forward = top_k_kl(of_policy, of_teacher, direction="forward")
    assert forward.item() == pytest.approx(kl_by_hand(teacher, own), abs=1e-6)
    # A token that the teacher does not have is one of the others.
    padded = torch.cat([of_teacher, torch.tensor([[-torch.inf]])], 1)
    wider = torch.cat([of_policy, torch.tensor([[-3.0]])], 1)
    assert torch.equal(top_k_kl(wider, padded, direction="reverse"), reverse)


def random_logits(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (33, 64) logits of a policy, and log-probabilities of a teacher."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(33, 64, dtype=torch.float64, generator=generator)
    teacher = torch.randn(33, 64, dtype=torch.float64, generator=generator)
    return 2 * own, (2 * teacher).log_softmax(-1)


def with_rest(probabilities: torch.Tensor, likely: torch.Tensor) -> torch.Tensor:
    is_likely = torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, likely, True)
    rest = probabilities.masked_fill(is_likely, 0.0).sum(-1, keepdim=True)
    return torch.cat([probabilities.gather(1, likely), rest], 1)


@pytest.mark.spec("distill.top-k")
@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("top_k", [1, 7, 60])
def test_the_kl_of_logits_equals_plain_torch_with_its_gradient(top_k: int, direction: str) -> None:
    logits, teacher = random_logits(top_k)
    likely = teacher.topk(top_k)
    one = logits.clone().requires_grad_()
    gathered = gathered_logprob(one, likely.indices)
    found = top_k_kl(gathered, likely.values, direction=direction)
    other = logits.clone().requires_grad_()
    q = with_rest(other.softmax(-1), likely.indices)
    p = with_rest(teacher.exp(), likely.indices)
    if direction == "reverse":
        wanted = (q * (q / p).log()).sum(-1)
    else:
        wanted = (p * (p / q).log()).sum(-1)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-9)
    weights = torch.arange(33.0, dtype=torch.float64) / 33
    (gradient,) = torch.autograd.grad((found * weights).sum(), one)
    (expected,) = torch.autograd.grad((wanted * weights).sum(), other)
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_kl_of_few_tokens_is_a_lower_bound_of_that_of_all(direction: str) -> None:
    logits, teacher = random_logits(0)
    own = logits.log_softmax(-1)
    if direction == "reverse":
        full = (own.exp() * (own - teacher)).sum(-1)
    else:
        full = (teacher.exp() * (teacher - own)).sum(-1)
    before = torch.zeros(33, dtype=torch.float64)
    for top_k in (1, 4, 16, 64):
        likely = teacher.topk(top_k)
        found = top_k_kl(own.gather(1, likely.indices), likely.values, direction=direction)
        assert bool((found >= before - 1e-12).all())
        before = found
    assert torch.allclose(before, full, rtol=0, atol=1e-9)


def test_the_gradient_of_the_top_k_kl_is_that_of_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(4, 9, dtype=torch.float64, generator=generator).requires_grad_()
    teacher = torch.randn(4, 9, dtype=torch.float64, generator=generator).log_softmax(-1)
    likely = teacher.topk(3)
    for direction in ("reverse", "forward"):
        assert torch.autograd.gradcheck(
            lambda logits, way=direction: top_k_kl(
                logits.log_softmax(-1).gather(1, likely.indices), likely.values, direction=way
            ),
            own,
        )


@pytest.mark.parametrize("tree", [False, True])
def test_the_term_of_a_pass_is_the_top_k_kl_of_its_rows(tree: bool) -> None:
    teachers, engine = teacher_of_model(1, top_k=4)
    batch = batch_from_trajectories(SAMPLES)
    work = with_teacher_logprobs(batch, SAMPLES, teachers, top_k=4)
    batch, report = asyncio.run(work)
    batch = batch.with_(advantages=torch.zeros(batch.loss_mask.shape))
    model = tiny_model(dtype=torch.float64)
    algorithm = AlgorithmConfig(
        policy_loss_coef=0.0,
        distillation=DistillationConfig(teachers={"math": "m"}, top_k=4, direction="forward"),
    )
    policy = Policy(model, tree=tree, temperature=0.8)
    metrics = accumulate_gradient(policy, batch, algorithm=algorithm)
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    plain = tiny_model(dtype=torch.float64)
    terms = []
    mass = []
    for one in SAMPLES[0].steps:
        ids = torch.tensor([[*one.prompt_token_ids, *one.response_ids]])
        places = slice(len(one.prompt_token_ids) - 1, ids.shape[1] - 1)
        own = (plain(ids).logits[0, places] / 0.8).log_softmax(-1)
        with torch.no_grad():
            likely = engine.model(ids).logits[0, places].log_softmax(-1).topk(4)
        chosen = own.gather(1, likely.indices)
        terms.append(top_k_kl(chosen, likely.values, direction="forward"))
        mass.append(likely.values.exp().sum(-1))
    term = torch.cat(terms).sum() / 6
    term.backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters()])
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)  # teachers return float32
    assert metrics["policy/distillation_loss"] == pytest.approx(term.item(), abs=1e-6)
    mean = float(torch.cat(mass).mean())
    assert report["distillation/teacher_top_mass"] == pytest.approx(mean, abs=1e-6)


def test_the_gradient_is_on_average_that_of_the_reverse_kl() -> None:
    logits = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    own = logits.log_softmax(-1)
    kl = (own.exp() * (own - teacher)).sum()
    (wanted,) = torch.autograd.grad(kl, logits, retain_graph=True)
    terms = (own.exp().detach() * (own - teacher).square() / 2).sum()
    (found,) = torch.autograd.grad(terms, logits)
    assert torch.allclose(found, wanted, atol=1e-12)


@pytest.mark.spec("distill.metrics")
def test_the_kl_is_also_that_of_each_source() -> None:
    samples = [
        trajectory("a", "math/hard", step([1, 4], [5, 6])),
        trajectory("b", "code", step([1, 5], [5])),
        trajectory("c", "code", step([1, 5], [6], trained=0)),
    ]
    batch = batch_from_trajectories(samples).with_(
        teacher_logprobs=torch.tensor([-1.0, -2.0, -3.0, -1.0])
    )
    own = torch.tensor([-1.5, -1.0, -1.0, float("nan")])
    assert distillation_metrics(batch, samples, own) == {
        "distillation/kl": pytest.approx((-0.5 + 1.0 + 2.0) / 3),
        "distillation/math_hard/kl": pytest.approx(0.25),
        "distillation/code/kl": pytest.approx(2.0),
    }
    batch = batch.with_(teacher_logprobs=torch.full((4,), torch.nan))
    assert distillation_metrics(batch, samples, own) == {}


# --- runs ---------------------------------------------------------------------------------------


def run(folder: Path, name: str, start_teachers: Any, *overrides: str, **options: Any) -> Path:
    """Train by distillation alone; return the file of metrics."""
    config = settings(
        folder,
        name,
        f"{DISTILLATION}.teachers.default={folder}/teacher",
        f"{A}.policy_loss_coef=0",
        "trainer.epochs=1",
        "generator.max_input_length=16",
        "generator.sampling_params.max_generate_length=8",
        *overrides,
    )
    parts = RunParts(start_teachers=start_teachers)
    request = RunRequest(make_rollouts=options.pop("rollouts", Recorder()), parts=parts)
    return run_request(config, GivenObjects("train_agent"), request).metrics


async def start_by_models(config: Any, tokenizer: Any, *, say: Any) -> Teachers:
    distillation = config.trainer.algorithm.distillation
    teachers = teachers_of(distillation.teachers, top_k=distillation.top_k)
    await teachers.start()
    return teachers


def test_a_run_learns_the_teacher_without_a_reward(folder: Path) -> None:
    tiny_model(seed=5).save_pretrained(folder / "teacher")
    rows = read_metrics(run(folder, "run", start_by_models, "trainer.epochs=8"))[1:]
    kls = [row["distillation/kl"] for row in rows]
    assert np.mean(kls[-4:]) < 0.5 * np.mean(kls[:2])


@pytest.mark.spec("distill.metrics")
def test_metrics_of_a_run_with_teachers(folder: Path) -> None:
    tiny_model(seed=5).save_pretrained(folder / "teacher")
    overrides = [
        f"{DISTILLATION}.top_k=3",
        f"data.train_data=[{folder}/train.jsonl, {folder}/val.jsonl]",
        "data.mixture={train: 1, val: 1}",
        "trainer.max_training_steps=1",
    ]
    row = read_metrics(run(folder, "run", start_by_models, *overrides))[1]
    of_table = [metric for metric in METRICS if metric.where == TEACHERS]
    absent = [metric.name for metric in of_table if not any(map(metric.matches, row))]
    assert absent == []
    assert {"distillation/train/kl", "distillation/val/kl"} <= row.keys()


@pytest.mark.spec("distill.lost")
def test_a_step_whose_teacher_is_lost_trains_the_same(folder: Path) -> None:
    tiny_model(seed=5).save_pretrained(folder / "teacher")

    class Lost(ModelEngine):
        async def score_prompt(self, token_ids: Any, *, top_k: int = 0) -> Any:
            if self.starts == 1 and len(self.scored) == 20:
                raise EngineDeadError("killed")
            return await super().score_prompt(token_ids, top_k=top_k)

    async def start_lost(config: Any, tokenizer: Any, *, say: Any) -> Teachers:
        name = config.trainer.algorithm.distillation.teachers["default"]
        engine: Any = Lost(teachers_of({"default": name}).of(None).engine.model)
        teachers = Teachers({"default": name}, {name: Teacher("teacher", engine)})
        await teachers.start()
        return teachers

    undisturbed = read_metrics(run(folder, "one", start_by_models))
    disturbed = read_metrics(run(folder, "other", start_lost))
    assert disturbed[-1]["faults/teacher_restarts"] == 1
    for one, other in zip(undisturbed, disturbed, strict=True):
        for name in ("policy/loss", "policy/grad_norm", "distillation/kl"):
            assert one.get(name) == other.get(name)


# --- the floor of the KL ------------------------------------------------------------------------

STEPS = 100
RATE = 0.01


def sample(model: Any, config: Any, prompts: Any, step: int) -> list[Trajectory]:
    rollouts = FakeRollouts(config, model)
    rollouts.version = 0
    return asyncio.run(rollouts.generate(prompts, step=step, phase="train"))


def distributions(model: Any, trajectories: list[Trajectory]) -> torch.Tensor:
    """Return (response tokens, V) log-probabilities; turns of a number have the same length."""
    found = []
    for turns in zip(*(one.steps for one in trajectories), strict=True):
        ids = torch.tensor([[*turn.prompt_token_ids, *turn.response_ids] for turn in turns])
        places = slice(len(turns[0].prompt_token_ids) - 1, ids.shape[1] - 1)
        found.append(model(ids).logits[:, places].log_softmax(-1).flatten(0, 1))
    return torch.cat(found)


@torch.no_grad()
def exact_kl(student: Any, teacher: Any, config: Any) -> float:
    """Return the mean of KL(student, teacher) over tokens that the student samples."""
    samples = sample(student, config, make_prompts(8), -1)
    own = distributions(student, samples)
    return float((own.exp() * (own - distributions(teacher, samples))).sum(-1).mean())


def fit_to_teacher(student: Any, teacher: Any, config: Any) -> None:
    """Fit the teacher's distribution at each token of its own samples: KL(teacher, student)."""
    optimizer = torch.optim.AdamW(student.parameters(), lr=RATE, weight_decay=0.0)
    prompts = make_prompts(8)
    for number in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - number / STEPS)
        half = prompts[:4] if number % 2 else prompts[4:]
        samples = sample(teacher, config, half, number)
        with torch.no_grad():
            target = distributions(teacher, samples)
        loss = (target.exp() * (target - distributions(student, samples))).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_kl_falls_to_the_floor_of_supervised_fitting(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    teacher = tiny_model(seed=5)
    teacher.save_pretrained(folder / "teacher")
    config = settings(folder, "unused")
    found = {"at the start": exact_kl(tiny_model(), teacher, config)}
    supervised = tiny_model()
    fit_to_teacher(supervised, teacher, config)
    found["supervised"] = exact_kl(supervised, teacher, config)
    schedule = [
        f"trainer.epochs={STEPS // 2}",
        "trainer.policy_mini_batch_size=4",
        "trainer.ckpt_interval=-1",
        "trainer.eval_before_train=false",
        "trainer.eval_interval=-1",
        "trainer.policy.optimizer_config.scheduler=linear",
        "trainer.policy.optimizer_config.weight_decay=0",
        f"trainer.policy.optimizer_config.lr={RATE}",
    ]
    for top_k in (0, 16):
        name = f"top_{top_k}"
        run(folder, name, start_by_models, f"{DISTILLATION}.top_k={top_k}", *schedule)
        (checkpoint,) = (folder / name / "checkpoints").glob("*/policy")
        student = AutoModelForCausalLM.from_pretrained(checkpoint)
        found[name] = exact_kl(student, teacher, config)
    with capsys.disabled():
        print("\nKL in nats per token:", {name: f"{kl:.4f}" for name, kl in found.items()})
    # As many steps on as many samples; one token says less of a distribution than all of it.
    assert found["top_16"] < 1.1 * found["supervised"]
    assert found["top_0"] < 0.7 * found["at the start"]


def test_settings_that_mean_nothing_are_refused() -> None:
    base = {"data.train_data": ["prompts.jsonl"], "trainer.policy.model.path": "model"}
    for teacher in (3, ""):
        with pytest.raises(ConfigError, match="expected a model folder, a hub name"):
            check_config(as_config(base | {f"{DISTILLATION}.teachers": {"math": teacher}}))
    with pytest.raises(ConfigError, match="math: expected http://host:port, the"):
        address = {"math": "http://localhost:8000/v1"}
        check_config(as_config(base | {f"{DISTILLATION}.teachers": address}))
