"""The probe and the settings that a run passes to vLLM."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_fast.config import Config, ConfigError, EnvironmentConfig
from skyrl_fast.config.loading import load_config
from skyrl_fast.config.model_folder import ModelHub
from skyrl_fast.rollout.engine.from_settings import (
    choose_cluster_backend,
    make_cluster_engines,
    make_vllm_setup,
)
from skyrl_fast.rollout.engine.pool import EnginePool
from skyrl_fast.rollout.engine.ray_engine import EngineBundle
from skyrl_fast.rollout.engine.weights.probe import LIMITS, ProbeLimits
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.loop_settings import loop_settings
from skyrl_fast.train.data.prompts import load_prompts
from skyrl_fast.train.flow.vllm_rollouts import VllmRollouts


class NoEngine:
    """An engine that is never started."""

    name = "none"


class MixingEngine(NoEngine):
    """An engine that computes the first sequence alone and those that wait then in one step.

    Of these, each changes the next one.
    """

    compute_dtype = torch.float32

    def __init__(self) -> None:
        self.started = 0

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        number = self.started
        self.started += 1
        await asyncio.sleep(0)  # until all wait
        return [-1.5 if number > 1 else -1.0] * (len(token_ids) - 1)


def test_probe_is_created_once_and_fits_the_engine(tmp_path: Path, tiny_tokenizer: Any) -> None:
    data = tmp_path / "train.jsonl"
    rows = [{"prompt": "a prompt that is longer than what the engine takes"}, {"prompt": "b" * 9}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config(
        None,
        [
            f"data.train_data=[{data}]",
            "trainer.policy.model.path=m",
            "trainer.max_prompt_length=8",
            "generator.sampling_params.max_generate_length=4",
        ],
    )
    prompts = load_prompts([str(data)], default_env_class="")
    pool = EnginePool([NoEngine()])  # type: ignore[list-item]
    rollouts = VllmRollouts(config, tiny_tokenizer, pool, EnvFactory(EnvironmentConfig()), prompts)
    probe = rollouts.probe_sequences
    assert [len(ids) for ids in probe] == [11, 9, 11, 9]  # with the next token 12, the limit
    assert tiny_tokenizer.decode(probe[0]) == "a prompt th"
    data.unlink()  # an update long after the start reads nothing
    assert rollouts.probe_sequences is probe


@pytest.mark.spec("sync.tolerance")
@pytest.mark.parametrize(
    ("settings", "dtype", "limits"),
    [
        ([], torch.float32, LIMITS[torch.float32]),
        (["model_dtype=bfloat16"], torch.bfloat16, LIMITS[torch.bfloat16]),
        (["model_dtype=bfloat16", "tolerance"], torch.bfloat16, ProbeLimits(maximum=0.7)),
        (["tolerance"], torch.float32, ProbeLimits(maximum=0.7)),
    ],
)
def test_tolerance_replaces_the_limits_of_the_dtype(
    settings: list[str],
    dtype: torch.dtype,
    limits: ProbeLimits,
    tiny_tokenizer: Any,
    tmp_path: Path,
) -> None:
    names = {
        "model_dtype=bfloat16": "generator.inference_engine.model_dtype=bfloat16",
        "tolerance": "trainer.sync_tolerance=0.7",
    }
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({"prompt": "some text"}) + "\n")
    needed = [f"data.train_data=[{data}]", "trainer.policy.model.path=m"]
    config = load_config(None, [*needed, *(names[setting] for setting in settings)])
    prompts = load_prompts([str(data)], default_env_class="")
    engine: Any = NoEngine()
    environments = EnvFactory(EnvironmentConfig())
    rollouts = VllmRollouts(config, tiny_tokenizer, EnginePool([engine]), environments, prompts)
    policy: Any = SimpleNamespace(dtype=torch.float32, router_replay=False)
    probe = rollouts.make_probe(engine, policy)
    assert (probe.dtype, probe.limits) == (dtype, limits)


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ([], "auto"),
        (["trainer.policy.dtype=bfloat16"], "bfloat16"),
        (["trainer.policy.dtype=float32"], "float32"),
        (
            [
                "trainer.policy.dtype=bfloat16",
                "generator.inference_engine.model_dtype=float32",
            ],
            "float32",
        ),
    ],
)
def test_an_engine_computes_in_the_dtype_of_the_policy(
    settings: list[str], dtype: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    needed = ["data.train_data=[x.jsonl]", f"trainer.policy.model.path={tmp_path}"]
    config = load_config(None, [*needed, *settings])
    setup = make_vllm_setup(config, str(tmp_path))
    assert setup.engine.model_dtype == dtype


def test_sequences_that_change_each_other_in_the_engine_are_noticed(
    tiny_tokenizer: Any, tmp_path: Path
) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({"prompt": "the only one"}) + "\n")
    config = load_config(None, [f"data.train_data=[{data}]", "trainer.policy.model.path=m"])
    prompts = load_prompts([str(data)], default_env_class="")
    engine: Any = MixingEngine()
    environments = EnvFactory(EnvironmentConfig())
    rollouts = VllmRollouts(config, tiny_tokenizer, EnginePool([engine]), environments, prompts)
    policy: Any = SimpleNamespace(
        dtype=torch.float32,
        router_replay=False,
        sequence_logprobs=lambda rows: [([-1.0] * (len(ids) - 1), 1.0) for ids in rows],
    )
    with pytest.raises(WeightSyncError, match=r"before any update .* by up to 0\.5"):
        asyncio.run(rollouts.make_probe(engine, policy).verify())


@pytest.mark.parametrize("path", ["~/model", "org/model"])
def test_engine_and_trainer_use_the_same_model_path(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    hub = ModelHub(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "model"
    if path == "org/model":  # as stored by a download
        folder = tmp_path / "models--org--model/snapshots/abc"
        refs = tmp_path / "models--org--model/refs"
        refs.mkdir(parents=True)
        (refs / "main").write_text("abc")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"max_position_embeddings": 64}')
    needed = ["data.train_data=[a.jsonl]", f"trainer.policy.model.path={path}"]
    config = load_config(
        None,
        [*needed, "trainer.max_prompt_length=8", "generator.sampling_params.max_generate_length=8"],
    )
    assert make_vllm_setup(config, path, hub=hub).model == str(folder)
    config.generator.max_input_length = 60  # its max_position_embeddings is read from there, too
    with pytest.raises(ValueError, match="expected at most the 64 positions"):
        make_vllm_setup(config, path, hub=hub)


@pytest.mark.spec("async.engine-threads")
def test_engine_takes_turns_with_the_trainer_in_synchronous_training(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    needed = ["data.train_data=[x.jsonl]", f"trainer.policy.model.path={tmp_path}"]
    for settings, wanted in (([], True), (["trainer.fully_async.enabled=true"], False)):
        config = load_config(None, [*needed, *settings])
        assert make_vllm_setup(config, str(tmp_path)).takes_turns == wanted


@pytest.mark.parametrize(("text", "wanted"), [("{", "invalid JSON"), ("[]", "got list")])
def test_a_models_broken_settings_are_named(text: str, wanted: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    needed = ["data.train_data=[x.jsonl]", f"trainer.policy.model.path={tmp_path}"]
    with pytest.raises(ValueError, match=rf"config\.json: .*{wanted}"):
        make_vllm_setup(load_config(None, needed), str(tmp_path))


@pytest.mark.spec("rollout.eval-sampling-defaults")
@pytest.mark.parametrize("stop", ["", "</sql>"])
def test_evaluation_without_the_training_stop_strings_is_a_warning(
    stop: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(
        None,
        [
            "data.train_data=[x.jsonl]",
            "trainer.policy.model.path=m",
            "generator.sampling_params={max_generate_length: 7, stop: ['</sql>']}",
            f"generator.eval_sampling_params={{temperature: 0, stop: ['{stop}']}}"
            if stop
            else "generator.eval_sampling_params.temperature=0",
        ],
    )
    own = loop_settings(config).eval_sampling_params
    assert own is not None
    assert (own.max_generate_length, own.stop) == (1024, [stop] if stop else None)
    assert ("eval_sampling_params.stop is empty" in caplog.text) == (not stop)


def test_unresolved_model_keeps_its_name() -> None:
    config = load_config(None, ["data.train_data=[a.jsonl]", "trainer.policy.model.path=m"])
    for path in ("nowhere", "./nowhere", "org/nowhere", "no/hub/name"):
        assert make_vllm_setup(config, path).model == path


def on_cluster(*overrides: str) -> Config:
    needed = ["data.train_data=[a.jsonl]", "trainer.policy.model.path=m"]
    return load_config(None, [*needed, "trainer.placement.colocate_all=false", *overrides])


@pytest.mark.spec("async.cluster-weights")
def test_engines_on_a_cluster_get_weights_by_a_broadcast() -> None:
    key = "generator.inference_engine"
    assert choose_cluster_backend(on_cluster("trainer.device=cpu"), has_gpu=True) == "gloo"
    ranks = "trainer.placement.policy_num_gpus_per_node=4"
    assert choose_cluster_backend(on_cluster(ranks), has_gpu=True) == "nccl"
    assert choose_cluster_backend(on_cluster(ranks), has_gpu=False) == "gloo"
    shared = [f"{key}.weight_sync_backend=file", f"{key}.weight_sync_path=/shared"]
    assert choose_cluster_backend(on_cluster(*shared)) == "file"


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("weight_sync_backend=ipc", "weight_sync_backend: expected auto or file with trainer.pla"),
        ("weight_sync_backend=file", "weight_sync_path: expected a folder that all nodes share"),
        ("gpu_ids=[0]", "gpu_ids: expected null with trainer.placement.colocate_all=false"),
        ("enable_sleep_mode=true", "enable_sleep_mode: expected null or false with"),
    ],
)
def test_settings_of_engines_on_a_cluster_are_checked(override: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        on_cluster(f"generator.inference_engine.{override}")


@pytest.mark.spec("update.engine-nodes")
def test_the_engines_of_a_cluster() -> None:
    two = "generator.inference_engine.num_engines=2"
    config = on_cluster(two, "trainer.run_path=r", "generator.inference_engine.num_threads=3")
    bundles = [EngineBundle(None, index) for index in range(2)]
    one, other = make_cluster_engines(config, "m", "127.0.0.1", bundles)
    assert (one.name, other.name) == ("engine 0", "engine 1")
    assert one.starts_with_model
