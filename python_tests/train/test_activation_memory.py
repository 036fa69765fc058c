"""Activations that the memory plan predicts, against those of real passes."""

from typing import Any

import pytest
import torch
from _memory import ARCHITECTURES, config_of, peak_bytes, saved_bytes

from skyrl_fast.config.settings import LoraConfig
from skyrl_fast.train.memory import activations
from skyrl_fast.train.memory.activations import activation_memory, model_size

LENGTH = 128
TOLERANCE = 0.01  # measured: 0.4 % at most
ALWAYS = ("llama", "gemma3", "qwen3_moe")  # one kind of layer, sliding windows, experts
PEAK_TOLERANCE = 0.05  # measured: 3.2 %; recomputed layers keep a few tensors longer

RESIDUALS = (torch.float32, torch.bfloat16)


# In the default run each architecture with and without checkpointing, and with both residuals.
def cases(*always: str) -> list[Any]:
    return [
        pytest.param(
            name, checkpointing, residual, id=f"{name}-{checkpointing}-{str(residual)[6:]}",
            marks=() if name in always and checkpointing == (residual != torch.float32)
            else pytest.mark.slow,
        )
        for name in ARCHITECTURES
        for checkpointing in (False, True)
        for residual in RESIDUALS
    ]  # fmt: skip


@pytest.mark.spec("memory.measured")
@pytest.mark.parametrize(("name", "checkpointing", "residual"), cases(*ALWAYS))
def test_saved_bytes_are_those_of_a_real_pass(
    name: str, checkpointing: bool, residual: torch.dtype
) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "gradient_checkpointing": checkpointing}
    options["residual_dtype"] = residual
    planned = activation_memory(config_of(name), LENGTH, **options)
    for sequences in (2, 6):
        measured = saved_bytes(config_of(name), sequences=sequences, length=LENGTH, **options)
        assert planned.saved.of(sequences) == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize(("name", "checkpointing", "residual"), cases("llama"))
def test_peak_is_that_of_the_allocator(
    name: str, checkpointing: bool, residual: torch.dtype
) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "gradient_checkpointing": checkpointing}
    options["residual_dtype"] = residual
    planned = activation_memory(config_of(name), LENGTH, **options)
    measured = peak_bytes(config_of(name), sequences=4, length=LENGTH, **options)
    total = planned.saved.of(4) + planned.workspace.of(4)
    assert total == pytest.approx(measured, rel=PEAK_TOLERANCE if checkpointing else TOLERANCE)


def test_shared_backbones_are_made_once_and_change_no_measurement() -> None:
    config = config_of("llama")
    shared = activations.FakeBackbones()
    for lora in (None, LoraConfig(rank=4)):
        for length, residual in zip((64, LENGTH), RESIDUALS, strict=True):
            options: dict[str, Any] = {
                "dtype": torch.bfloat16,
                "gradient_checkpointing": True,
                "residual_dtype": residual,
                "lora": lora,
            }
            alone = activation_memory(config_of("llama"), length, **options)
            together = activation_memory(config, length, backbones=shared, **options)
            assert together == alone
    assert shared.num_made == 2  # with and without the adapter


@pytest.mark.spec("memory.plan")
def test_sizes_are_those_of_the_model() -> None:
    size = model_size(config_of("qwen2"))  # tied: the head is the embedding
    layer = 128 * (128 + 2 * 64) + 128 + 2 * 64 + 128 * 128 + 3 * 128 * 352 + 2 * 128
    assert size.layer_parameters == layer
    assert size.rounded_layer_parameters == layer - 2 * 128  # without norms
    assert size.rounded_parameters == 4 * (layer - 2 * 128)
    assert size.root_parameters == 512 * 128 + 128
    assert size.parameters == 4 * layer + 512 * 128 + 128
    assert (size.vocab_size, size.hidden_size) == (512, 128)
    assert size.kv_values == 2 * 4 * 2 * 32


HYBRID = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
MINICPM3 = {"kv_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 32}


@pytest.mark.parametrize(
    ("name", "changes", "values"),
    [
        ("deepseek_v3", {}, 3 * (48 + 32)),  # a latent vector, and the rotated part of the key
        ("MiniCPM3", {**MINICPM3, "num_key_value_heads": 4}, 2 * 2 * 4 * (16 + 32)),  # its heads
        ("Qwen3Next", {**HYBRID, "num_hidden_layers": 3, "num_experts": 4}, 2 * 2 * 32),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, 2 * 2 * 32),
        ("Mamba", {}, 0),
        # A full layer has larger heads; the last two layers use the keys of others.
        ("Gemma4Text", {"num_kv_shared_layers": 2, "num_hidden_layers": 8}, 2 * 2 * (5 * 32 + 64)),
    ],
)
def test_the_engine_stores_keys_and_values_of_attention_layers(
    name: str, changes: dict[str, Any], values: int
) -> None:
    others = {"num_hidden_layers": 2, "global_head_dim": 64, **changes}
    config = config_of(name) if name in ARCHITECTURES else config_of(name, **others)
    assert model_size(config).kv_values == values


def test_each_policy_has_an_adapter() -> None:
    pytest.importorskip("peft")
    one = model_size(config_of("qwen2"), LoraConfig(rank=4))
    two = model_size(config_of("qwen2"), LoraConfig(rank=4, policies=["planner", "worker"]))
    assert two.trained_parameters == 2 * one.trained_parameters > 0
    assert two.parameters - two.trained_parameters == one.parameters - one.trained_parameters
