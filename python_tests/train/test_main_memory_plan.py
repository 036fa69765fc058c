"""The memory plan of a run on a processor."""

from pathlib import Path

import pytest
import torch
from _planned import config_of, sizes
from _planned import measured_once as measured_once
from _planned import small as small

from skyrl_fast.cli import main
from skyrl_fast.ops._backend import main_memory
from skyrl_fast.train.memory.device_plan import GIB
from skyrl_fast.train.memory.plan import plan_memory
from skyrl_fast.train.setup import model_checks


@pytest.mark.spec("memory.main-memory")
def test_on_a_cpu_trainer_and_engine_have_the_main_memory(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parts(*overrides: str) -> dict[str, int]:
        cpu = config_of(small, "trainer.device=cpu", *overrides)
        return sizes(plan_memory(cpu, capacity=64 * GIB))

    parameters = 494_032_768
    adapter = 8_798_208
    weights = "engine: weights, and their copy in the kernels' layout"
    plain = parts()
    assert plain["trainer: weights, float32"] == 4 * parameters
    assert plain["trainer: AdamW's moments"] == 8 * parameters
    assert plain[weights] == 2 * 4 * parameters  # an engine's dtype is float32 here, too
    assert plain["engine: KV cache (VLLM_CPU_KVCACHE_SPACE)"] == GIB
    activations = "trainer: activations of 16,384 tokens, without checkpointing"
    recomputed = parts("trainer.gradient_checkpointing=true")
    with_checkpointing = activations.replace("without", "with")
    assert recomputed[with_checkpointing] < 0.2 * plain[activations]
    bfloat16 = parts("trainer.policy.dtype=bfloat16", "trainer.policy.model.lora.rank=16")
    assert bfloat16["trainer: frozen weights, bfloat16"] == 2 * parameters
    assert bfloat16["trainer: adapter, float32"] == 4 * adapter
    assert bfloat16[weights] == 2 * 4 * parameters
    file = "weights for the engine, and their file"
    two = parts("trainer.placement.policy_num_gpus_per_node=2")
    assert two["2 ranks: weights, float32"] == 4 * parameters  # half of them each
    assert two[file] == 2 * 4 * parameters and file not in plain.keys() | bfloat16.keys()
    servers = "generator.inference_engine.external_server_urls=[http://127.0.0.1:1]"
    elsewhere = parts("generator.inference_engine.run_engines_locally=false", servers)
    assert all(name.startswith("trainer: ") for name in elsewhere)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    assert parts()["engine: KV cache (VLLM_CPU_KVCACHE_SPACE)"] == 3 * GIB


@pytest.mark.spec("memory.main-memory")
def test_what_makes_a_run_fit_into_main_memory(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("data: {train_data: [none]}\ntrainer: {device: cpu}\n")
    command = ["plan", str(path), f"trainer.policy.model.path={small}"]
    assert main([*command, "--device-memory", "20GiB"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("main memory: ")
    remedies = printed.split("it would fit with:\n")[1].partition("for example:")[0].split()
    assert remedies == ["trainer.gradient_checkpointing=true"]
    assert main([*command, *remedies, "--device-memory", "20GiB"]) == 0
    main(command)
    assert f" of {main_memory() / GIB:,.1f} GiB\n" in capsys.readouterr().out


@pytest.mark.spec("memory.main-memory")
def test_a_machine_without_a_gpu_is_planned_by_its_main_memory(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.device_count():
        pytest.skip("this machine has a GPU")
    path = tmp_path / "config.yaml"
    path.write_text(f"trainer: {{policy: {{model: {{path: {small}}}}}}}\n")  # without data
    command = ["plan", str(path), "trainer.max_tokens_per_microbatch=256"]
    main(command)
    printed = capsys.readouterr()
    assert f" of {main_memory() / GIB:,.1f} GiB\n" in printed.out
    assert printed.out.startswith("main memory: ")
    assert "--device-memory 79GiB plans for a GPU" in printed.err
    for described in (
        ["--device-memory", "79GiB"],
        ["--num-gpus", "1"],
        ["trainer.device=cuda"],
        ["trainer.placement.policy_num_gpus_per_node=2"],
    ):
        main([*command, *described])
        printed = capsys.readouterr()
        assert "GPU 0" in printed.out and " of 79.0 GiB\n" in printed.out
        assert "plans for a GPU" not in printed.err


@pytest.mark.spec("memory.cpu-warning")
def test_a_run_on_a_cpu_is_warned_of_more_memory_than_there_is(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_checks, "PLANNED_BYTES", 0)
    config = config_of(small, "trainer.device=cpu", "trainer.max_tokens_per_microbatch=256")
    for memory, is_warned in ((64 * GIB, False), (2 * GIB, True)):
        caplog.clear()
        plan = model_checks.plan_run_memory(config, None, with_engine=True, memory=memory)
        assert plan is None
        assert bool(caplog.messages) is is_warned
    (warning,) = caplog.messages
    assert warning.startswith("the run may need more memory than this machine has:\nmain memory: ")
    assert "does not fit: main memory lacks" in warning
    assert config.trainer.device == "cpu"
