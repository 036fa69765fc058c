"""What the memory plan decides: runs, published recipes, the command, the hardware page."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from _planned import GPU, IPC, FakeGpus, config_of, plan_on, sizes
from _planned import measured_once as measured_once
from _planned import small as small
from _training import folder as folder
from _training import settings

from scripts import hardware_page
from scripts.published_models import BILLIONS, model_folder
from skyrl_fast.cli import main
from skyrl_fast.commands.plan import num_bytes
from skyrl_fast.config import Config, ConfigError
from skyrl_fast.config.loading import as_config, load_config
from skyrl_fast.rollout.engine import vllm_start
from skyrl_fast.train.flow.vllm_rollouts import VllmRollouts
from skyrl_fast.train.memory.device_plan import GIB
from skyrl_fast.train.memory.plan import (
    plan_memory,
    settle_ranks,
)
from skyrl_fast.train.model.loading import recomputes_activations
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.run import RunParts, RunRequest, run_request
from skyrl_fast.train.setup import model_checks
from skyrl_fast.train.setup.errors import SetupError
from skyrl_fast.train.setup.given_objects import GivenObjects, with_absolute_paths

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RECIPES = [path for path in sorted(EXAMPLES.glob("*/*.yaml")) if "of 80 GB:" in path.read_text()]


PUBLIC_TASKS = EXAMPLES.parent / "docs/guide/public_tasks.md"


def run_with(config: Config, parts: RunParts, *, reward: Any = None) -> None:
    """Run as `train_agent` does, with these parts."""
    given = GivenObjects("train_agent", reward=reward)
    run_request(config, given, RunRequest(parts=parts))


def on_gpus(gpus: FakeGpus, make_models: Any) -> RunParts:
    """Return the parts of a run that plans for these GPUs."""
    plan = functools.partial(model_checks.plan_run_memory, gpus=gpus)
    return RunParts(plan, make_models, check_rollouts=lambda *_: None)


@pytest.mark.spec("memory.free")
def test_unused_memory_is_returned_before_the_engine_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(policy: Policy) -> None:
        raise LookupError("no engine yet")

    async def start(*arguments: object) -> None:
        raise AssertionError("the engine started first")

    monkeypatch.setattr(Policy, "free_cached_memory", stop)
    monkeypatch.setattr(VllmRollouts, "start", start)
    parts = RunParts(check_rollouts=lambda *_: None)
    with pytest.raises(LookupError, match="no engine yet"):
        run_with(settings(folder, "run"), parts, reward=lambda answer, row: 0.0)


@pytest.mark.spec("memory.saved-logits")
def test_train_saves_the_logits_of_the_plan(folder: Path) -> None:
    found: list[Any] = []

    def stop(*arguments: Any, saved_logits_bytes: int | None, **options: bool) -> None:
        found.append(saved_logits_bytes)
        assert not any(options.values())  # of one rank, without an adapter
        raise ValueError("stop here")

    short = ("generator.max_input_length=40", "generator.sampling_params.max_generate_length=16")
    chosen = settings(folder, "run", *short, "generator.chat_template=plain")
    with pytest.raises(SetupError, match="stop here"):
        run_with(chosen, on_gpus(FakeGpus(), stop), reward=lambda answer, row: 0.0)
    config = with_absolute_paths(as_config(chosen))
    plan = plan_on(FakeGpus(), config)
    assert plan is not None and found == [plan.saved_logits_bytes] and found[0] > 0


ALWAYS = ("multi_turn_qwen2.5_0.5b", "qwen2.5_coder_7b")  # one GPU, and several


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(p, marks=() if p.stem in ALWAYS else pytest.mark.slow) for p in RECIPES],
    ids=lambda path: path.stem,
)
def test_published_recipes_fit_the_gpus_that_they_name(recipe: Path, tmp_path: Path) -> None:
    config = load_config(recipe, [])
    name = str(config.trainer.policy.model.path)
    config.trainer.policy.model.path = str(model_folder(tmp_path, name))
    plan = plan_memory(config, capacity=GPU)
    assert plan.fits, str(plan)
    assert plan.engine_share is not None and plan.engine_share >= 0.25
    num_gpus = config.trainer.placement.policy_num_gpus_per_node
    parameters = sizes(plan)["weights, float32"] * num_gpus / 4e9
    assert parameters == pytest.approx(BILLIONS[name], rel=0.001)
    words, each = {1: "One GPU", 2: "Two GPUs", 4: "Four GPUs"}, " on each" * (num_gpus > 1)
    needs = f"an update needs {plan.devices[0].total / GIB:.0f} GiB{each}, while the engine sleeps."
    assert f"# {words[num_gpus]} of 80 GB: by `skyrl-fast plan` {needs}" in recipe.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "capacity", "row"),
    [
        (["qwen3_4b"], 22 * GIB, "| qwen3_4b.yaml | one of 24 GB |"),
        (["qwen3_4b"], 44 * GIB, "| qwen3_4b.yaml | one of 48 GB |"),
        (["qwen3_4b", "eight_gpus"], 44 * GIB, "| with eight_gpus.yaml | eight of 48 GB |"),
    ],
)
def test_larger_models_of_public_tasks_need_what_their_page_says(
    files: list[str], capacity: int, row: str, tmp_path: Path
) -> None:
    paths = [EXAMPLES / f"bfcl/{name}.yaml" for name in files]
    config = load_config(paths[0], [str(path) for path in paths[1:]])
    name = str(config.trainer.policy.model.path)
    config.trainer.policy.model.path = str(model_folder(tmp_path, name))
    plan = plan_memory(config, capacity=capacity)
    assert plan.fits, str(plan)
    update = plan.devices[0].total / GIB
    cache = sizes(plan, 1)["engine: weights and KV cache"] / GIB
    assert f"{row} {update:.1f} | {cache:.1f} |" in PUBLIC_TASKS.read_text()
    assert f"an update needs {update:.1f} GiB" in paths[-1].read_text()


def test_command(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"data: {{train_data: [x]}}\ntrainer: {{policy: {{model: {{path: {small}}}}}}}\n"
    )
    assert main(["plan", str(file), "--device-memory", "80GiB"]) == 0
    assert "fits; gpu_memory_utilization=0.90" in capsys.readouterr().out
    assert main(["plan", str(file), "--device-memory", "8GiB"]) == 1
    out = capsys.readouterr().out
    assert "does not fit: GPU 0, update lacks" in out
    command = out.splitlines()[-1].removeprefix("for example: skyrl-fast train ")
    assert command.startswith(f"{file} trainer.")
    assert main(["plan", *command.split(), "--device-memory", "8GiB"]) == 0
    assert "fits" in capsys.readouterr().out
    assert main(["plan", str(file), "trainer.policy.model.path=/nowhere"]) == 2
    assert "model folder not found: /nowhere" in capsys.readouterr().err
    for option, value in [
        ("--device-memory", "80"),
        ("--device-memory", "0GiB"),
        ("--num-gpus", "0"),
        ("--num-gpus", "-3"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            main(["plan", str(file), f"{option}={value}"])
        assert f"{option}: expected a " in capsys.readouterr().err


@pytest.mark.spec("memory.refused")
def test_train_refuses_on_a_gpu(folder: Path) -> None:
    parts = on_gpus(FakeGpus((num_bytes("1MiB"),)), lambda *_: pytest.fail("models were loaded"))
    with pytest.raises(SetupError, match=r"(?s)more memory than its GPUs have.*lacks .* GiB"):
        run_with(settings(folder, "run"), parts)


@pytest.mark.spec("memory.unmeasurable")
def test_a_model_that_reads_values_is_trained_without_a_plan(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    def reads_a_value(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if float(hidden.sum()) > 0 else -hidden

    monkeypatch.setattr(Qwen2MLP, "forward", reads_a_value)
    # No other test measures this.
    config = config_of(small, "generator.max_input_length=333")
    assert plan_on(FakeGpus(), config) is None
    assert config.generator.inference_engine.gpu_memory_utilization == 0.5
    assert "no memory plan: the model's memory cannot be measured" in caplog.text


def test_a_resumed_run_is_planned_from_its_checkpoint(small: Path, tmp_path: Path) -> None:
    model_folder(tmp_path / "policy", "Qwen/Qwen2.5-0.5B-Instruct")
    config = config_of(tmp_path / "deleted")
    assert plan_on(FakeGpus(), config, tmp_path) is not None
    assert config.trainer.policy.model.path == str(tmp_path / "deleted")
    assert config.trainer.ref.model.path is None


@pytest.mark.spec("memory.device-defaults")
def test_defaults_by_device() -> None:
    trainer = Config().trainer
    assert recomputes_activations(trainer, torch.device("cuda"))
    assert not recomputes_activations(trainer, torch.device("cpu"))
    for chosen in (True, False):
        fixed = dataclasses.replace(trainer, gradient_checkpointing=chosen)
        assert recomputes_activations(fixed, torch.device("cuda")) is chosen
    setup = vllm_start.VllmSetup("model", max_model_len=64, on_cpu=True)
    assert vllm_start.engine_args(setup)["enforce_eager"] is True
    setup = dataclasses.replace(setup, on_cpu=False)
    on_gpu = vllm_start.engine_args(setup)
    assert on_gpu["enforce_eager"] is False
    assert on_gpu["gpu_memory_utilization"] == 0.9
    setup.engine.enforce_eager = True
    setup.engine.gpu_memory_utilization = 0.5
    fixed_args = vllm_start.engine_args(setup)
    assert (fixed_args["enforce_eager"], fixed_args["gpu_memory_utilization"]) == (True, 0.5)


def ranks_by_plan(model: Path, memory: str, *overrides: str) -> int | None:
    """Return the ranks of a machine of eight GPUs where the setting is null."""
    config = config_of(model, "trainer.placement.policy_num_gpus_per_node=null", *overrides)
    settle_ranks(config, capacity=num_bytes(memory), num_gpus=8)
    return config.trainer.placement.policy_num_gpus_per_node


@pytest.mark.spec("memory.ranks")
def test_the_plan_divides_a_machine(small: Path) -> None:
    asynchronous = "trainer.fully_async.enabled=true"
    assert ranks_by_plan(small, "79GiB") == 8
    assert ranks_by_plan(small, "79GiB", asynchronous) == 4
    engines = "generator.inference_engine.num_engines=2"
    assert ranks_by_plan(small, "79GiB", asynchronous, engines) == 6
    assert ranks_by_plan(small, "2GiB", asynchronous) == 7  # none fits: the most that share weights
    assert ranks_by_plan(small, "79GiB", "trainer.device=cpu") == 1
    engines = "generator.inference_engine.num_engines=8"
    assert ranks_by_plan(small, "79GiB", IPC, engines) == 8
    top_k = (
        "trainer.algorithm.distillation.teachers={default: 'http://127.0.0.1:8000'}",
        "trainer.algorithm.distillation.top_k=8",
    )
    with pytest.raises(ConfigError, match="sampled one are computed by one rank"):
        ranks_by_plan(small, "79GiB", *top_k)


def test_a_run_draws_how_its_gpus_are_divided(small: Path) -> None:
    null = "trainer.placement.policy_num_gpus_per_node=null"
    config = config_of(small, null, "trainer.fully_async.enabled=true")
    plan = plan_on(FakeGpus((GPU,) * 4), config)
    assert plan is not None
    assert "rank    0  1  .  .\nengine  .  .  0  1" in str(plan)
    assert config.trainer.placement.policy_num_gpus_per_node == 2
    assert config.generator.inference_engine.gpu_ids == [2, 3]


@pytest.mark.slow
def test_hardware_page_is_up_to_date() -> None:
    """Two of its rows; all take a minute."""
    page = hardware_page.PAGE.read_text(encoding="utf-8")
    for name in ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-Coder-7B-Instruct"):
        for row in hardware_page.rows_of(name):
            assert row in page, "run python -m scripts.hardware_page"
