"""Sequences of a pass that share its rows: exact, where the model keeps them apart."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from _float64 import float64_throughout
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_fast.ops.passes.plan import balance_parts
from skyrl_fast.train.model.forward_pass import MicroBatch
from skyrl_fast.train.model.lm_head import backbone as backbone_part
from skyrl_fast.train.model.packed_rows import find_packed_support, pack_rows
from skyrl_fast.train.model.row_layout import supports_trees
from skyrl_fast.train.model.tree_forward import last_hidden_states

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 4}
EXACT = {
    "llama": {},
    "qwen2": {},
    "mistral": WINDOW,
    "gemma2": {"head_dim": 8, **WINDOW},
    "gemma3_text": {"head_dim": 8, **WINDOW},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},  # learned positions
    "falcon": {"alibi": True},
}
# Positions from places in a row, states that run on along it, or a convolution over it.
REFUSED = {
    "bloom": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "mamba": {},
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 4, "lru_width": 32},
    # From places beyond the lengths of the probe: queries' factors, and blocks of keys.
    "llama4_text": {
        **{"head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2},
        **{"attn_temperature_tuning": True, "no_rope_layers": [1, 0]},
    },
    "minimax_m3_vl_text": {
        **{"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
        **{"layer_types": ["minimax_m3_sparse"] * 2, "index_n_heads": 2, "index_head_dim": 8},
    },
}
LENGTHS = (12, 3, 5, 4, 7, 2)


def backbone_of(family: str, settings: dict[str, Any], attention: str = "eager") -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return backbone_part(model.double().eval())


def sequences(lengths: tuple[int, ...], width: int) -> MicroBatch:
    """Return sequences of which each token's hidden state is wanted, with ids in the padding."""
    ids = torch.randint(1, 64, (len(lengths), width), generator=torch.Generator().manual_seed(1))
    index = torch.cat([torch.arange(n) + width * row for row, n in enumerate(lengths)])
    nothing = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(ids, index, nothing, nothing, nothing)


def states_and_gradient(backbone: Any, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    backbone.zero_grad()
    hidden = last_hidden_states(backbone, micro, CPU)[micro.hidden_index]
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
    (hidden * weights).sum().backward()
    grads = [p.grad.flatten() for p in backbone.parameters() if p.grad is not None]
    return hidden.detach(), torch.cat(grads)


@pytest.mark.spec("tree.packed-rows")
@pytest.mark.parametrize("family", EXACT)
def test_packed_rows_equal_rows_alone(family: str) -> None:
    backbone = backbone_of(family, EXACT[family])
    micro = sequences(LENGTHS, 12)
    assert pack_rows(backbone, micro) is None  # before the model was probed
    with float64_throughout(backbone):
        padded, padded_gradient = states_and_gradient(backbone, micro)
        assert find_packed_support(backbone)
        rows = pack_rows(backbone, micro)
        assert rows is not None and rows.input_ids.shape == (3, 12)  # 33 tokens
        packed, packed_gradient = states_and_gradient(backbone, micro)
        alone = torch.cat(
            [
                backbone(input_ids=micro.input_ids[row : row + 1, :n], use_cache=False)
                .last_hidden_state[0]
                .detach()
                for row, n in enumerate(LENGTHS)
            ]
        )
    torch.testing.assert_close(packed, padded, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(packed, alone, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(packed_gradient, padded_gradient, rtol=1e-10, atol=1e-10)


def test_scaled_dot_product_attention_is_exact() -> None:
    backbone = backbone_of("llama", {}, "sdpa")
    micro = sequences(LENGTHS, 12)
    with float64_throughout(backbone):
        padded, padded_gradient = states_and_gradient(backbone, micro)
        assert find_packed_support(backbone)
        packed, packed_gradient = states_and_gradient(backbone, micro)
        assert pack_rows(backbone, micro) is not None
    # Sums in another order.
    torch.testing.assert_close(packed, padded, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(packed_gradient, padded_gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_mix_sequences_get_padded_rows(family: str) -> None:
    backbone = backbone_of(family, REFUSED[family]).float()  # experts know no float64
    assert not find_packed_support(backbone)
    micro = sequences(LENGTHS, 12)
    assert pack_rows(backbone, micro) is None
    assert torch.isfinite(last_hidden_states(backbone, micro, CPU)).all()


def test_hybrid_models_with_recurrent_layers_get_padded_rows() -> None:
    settings = {
        "head_dim": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    }
    backbone = backbone_of("qwen3_next", settings).float()  # its experts know no float64
    assert not find_packed_support(backbone)


@pytest.mark.parametrize("seed", range(20))
def test_packed_rows_of_random_lengths(seed: int) -> None:
    rng = np.random.default_rng(seed)
    backbone = backbone_of("llama", {})
    assert find_packed_support(backbone)
    lengths = tuple(rng.integers(1, 17, rng.integers(2, 12)).tolist())
    width = max(lengths)
    micro = sequences(lengths, width)
    rows = pack_rows(backbone, micro)
    count = balance_parts(np.array(lengths), width)[1]
    # A token costs as much as 6 * 32 pairs; a mask has width pairs of each token, half needed.
    costs_less = count * (192 + width) < len(lengths) * (192 + width / 2)
    assert (rows is not None) == costs_less
    if rows is None:
        return
    assert rows.input_ids.shape == (count, width)
    places = rows.places[micro.hidden_index]
    assert len(set(places.tolist())) == sum(lengths)  # each token has a place of its own
    ids = micro.input_ids.flatten()[micro.hidden_index]
    assert torch.equal(rows.input_ids.flatten()[places], ids)
    columns = torch.cat([torch.arange(n) for n in lengths])
    assert torch.equal(rows.positions.flatten()[places], columns)


def test_rows_are_packed_only_where_that_costs_less() -> None:
    backbone = backbone_of("llama", {})
    assert find_packed_support(backbone)
    assert pack_rows(backbone, sequences((12, 11, 12), 12)) is None  # nothing to save
    # Seven rows of eight remain, of which a mask computes twice the pairs: 6 * 32 + 400 against
    # 6 * 32 + 200 for each row.
    width = 400
    assert pack_rows(backbone, sequences((width,) * 6 + (width // 2,) * 2, width)) is None
    assert pack_rows(backbone, sequences((width,) + (width // 8,) * 7, width)) is not None


def test_replayed_routes_and_single_rows_stay_as_they_are() -> None:
    backbone = backbone_of("llama", {})
    assert find_packed_support(backbone)
    assert pack_rows(backbone, sequences((12,), 12)) is None
    micro = sequences(LENGTHS, 12)
    assert pack_rows(backbone, micro) is not None
    routes = torch.zeros((*micro.input_ids.shape, 2, 1), dtype=torch.int64)
    assert pack_rows(backbone, replace(micro, expert_indices=routes)) is None


def test_the_choice_of_the_layout_finds_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "skyrl_fast")
    backbone = backbone_of("llama", {})
    assert not supports_trees(backbone, False)
    assert "packed where that costs less" in caplog.text
    assert pack_rows(backbone, sequences(LENGTHS, 12)) is not None
    caplog.clear()
    assert not supports_trees(backbone_of("bloom", {}), None)
    assert "sequences of a pass are padded" in caplog.text
