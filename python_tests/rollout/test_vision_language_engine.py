"""Vision-language models on real vLLM: their language models are exact after every update."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from _vision_language import ROPE, TEXT, vision_language_model
from _weights import update_engine

from skyrl_fast.rollout.engine.vllm_engine import VllmEngine
from skyrl_fast.rollout.engine.vllm_start import VllmSetup, engine_args, keeps_states
from skyrl_fast.rollout.engine.weights.probe import WeightProbe
from skyrl_fast.train.model.loading import load_model
from skyrl_fast.train.model.policy import Policy

pytest.importorskip("transformers", minversion="5.0")

UPDATES = 3
TOLERANCE = 1e-5  # float32 on both sides; the kernels sum in another order
HEADS = {  # of the smallest size in vLLM
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip
SECTIONS = {"rope_parameters": {**ROPE, "mrope_section": [6, 5, 5], "partial_rotary_factor": 1.0}}
TOKENS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma4": {"global_head_dim": 32, "hidden_size_per_layer_input": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "qwen3_vl": SECTIONS,
    "glm4v": SECTIONS,
    "internvl": {},
}


def needs_torchvision(family: str) -> Any:
    """Return a slow case, as vLLM imports the family's processor of images."""
    missing = importlib.util.find_spec("torchvision") is None
    reason = "vLLM imports torchvision for this family"
    return pytest.param(
        family, marks=[pytest.mark.slow, pytest.mark.skipif(missing, reason=reason)]
    )


def make_folder(family: str, folder: Path, tokenizer: Any) -> Policy:
    tokenizer.save_pretrained(folder)
    sizes = {**HEADS, "vocab_size": len(tokenizer), **FAMILIES[family]}
    if family == "gemma4":
        sizes["vocab_size_per_layer_input"] = len(tokenizer)
    model = vision_language_model(family, **sizes)
    model.get_output_embeddings().weight.data.mul_(0.25)  # rounding grows with the logits
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    return Policy(load_model(str(folder), device=torch.device("cpu")))


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.spec("sync.saved-class", "sync.engine-without-parts")
@pytest.mark.parametrize(
    "family", ["gemma4", *(needs_torchvision(name) for name in FAMILIES if name != "gemma4")]
)
async def test_updates_are_exact(family: str, tiny_tokenizer: Any, tmp_path: Path) -> None:
    if family == "gemma4":  # transformers 5.19 needs torchvision for its processor, 5.24 does not
        pytest.importorskip("transformers.models.gemma4.processing_gemma4")
    policy = make_folder(family, tmp_path / "model", tiny_tokenizer)
    setup = VllmSetup(
        str(tmp_path / "model"), max_model_len=128, log_file=str(tmp_path / "engine.log")
    )

    generator = torch.Generator().manual_seed(0)
    async with VllmEngine(setup) as engine:
        probe = WeightProbe(
            engine,
            probe=torch.randint(200, (2, 48), generator=generator).tolist(),
            trainer_logprobs=policy.sequence_logprobs,
        )
        assert (await probe.verify()).difference.maximum < TOLERANCE
        for _ in range(UPDATES):
            for _, parameter in policy.trained_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data.add_(0.01 * noise)
            report = await update_engine(engine, probe, policy.named_weights(), policy.frozen_parts)
            assert report.difference.maximum < TOLERANCE < 0.1 < report.max_change


@pytest.mark.spec("sync.engine-without-parts")
def test_only_engines_of_vision_language_models_leave_parts_out(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    vision_language_model("internvl").save_pretrained(tmp_path)
    assert engine_args(VllmSetup(str(tmp_path)))["language_model_only"] is True
    assert (
        engine_args(VllmSetup(str(tmp_path)))["max_num_batched_tokens"]
        >= TEXT["max_position_embeddings"]
    )
    assert "language_model_only" not in engine_args(VllmSetup(str(tiny_model_folder)))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("qwen3_next", True),
        ("bamba", True),
        ("falcon_h1", True),
        ("nemotron_h", True),
        ("lfm2", True),
        ("mamba2", True),
        ("olmo_hybrid", True),
        ("recurrent_gemma", True),
        ("minimax", True),
        ("qwen3", False),
        ("gemma3_text", False),
        ("gpt_oss", False),
        ("llama4_text", False),
    ],
)
def test_layers_with_a_state_are_found_in_the_configuration(kind: str, expected: bool) -> None:
    """vLLM has no prefix cache for them on a CPU."""
    from transformers import CONFIG_MAPPING

    assert keeps_states(CONFIG_MAPPING[kind]().to_dict()) == expected


@pytest.mark.parametrize("tuning", [True, False])
def test_the_engine_scales_queries_where_the_model_does(tuning: bool, tmp_path: Path) -> None:
    config = {"text_config": {"attn_temperature_tuning": tuning}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = engine_args(VllmSetup(str(tmp_path), max_model_len=64))
    assert arguments["override_generation_config"] == {"attn_temperature_tuning": tuning}
