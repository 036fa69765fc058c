"""Heads: biases, scales and caps of models are found, applied and trained, or refused by name."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from _fakes import tiny_model
from _rows import mixed_batch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from skyrl_fast.train.model.lm_head import find_head
from skyrl_fast.train.model.micro_batch import plan_micro_batches, response_positions
from skyrl_fast.train.model.policy import Policy

SIZES = {
    "vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "n_layer": 2, "n_embd": 16,
    "n_head": 2, "rotary_dim": 4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "dim_model_base": 4,
}  # fmt: skip
MOE = {"num_local_experts": 2, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 16}
RECURRENT = {"lru_width": 16, "attention_window_size": 8, "conv1d_width": 2}
FAMILIES: dict[str, tuple[dict[str, Any], float, float | None, bool]] = {
    # settings; scale, soft cap and bias
    "llama": ({}, 1.0, None, False),
    "gemma2": ({}, 1.0, 30.0, False),
    "vaultgemma": ({"final_logit_softcapping": 2.5}, 1.0, 2.5, False),
    "nanochat": ({}, 1.0, 15.0, False),
    "recurrent_gemma": (RECURRENT, 1.0, 30.0, False),
    "cohere": ({"logit_scale": 0.0625}, 0.0625, None, False),
    "cohere2": ({"logit_scale": 0.3}, 0.3, None, False),
    "granite": ({"logits_scaling": 3.0}, 1 / 3.0, None, False),
    "minicpm3": (LATENT, 4 / 16, None, False),  # of the hidden states
    "phi": ({}, 1.0, None, True),
    "gptj": ({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, 1.0, None, True),
    "llama4_text": (MOE, 1.0, None, False),
}


def model_of(family: str, deviation: float = 0.2) -> Any:
    """Return a tiny model in float64, whose logits are small with the default deviation of 0.02."""
    config = CONFIG_MAPPING[family](**{**SIZES, **FAMILIES[family][0]})
    config.initializer_range = deviation
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).double()
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:
        torch.nn.init.normal_(bias)
    return model


@pytest.mark.spec("loss.lm-head")
@pytest.mark.parametrize("deviation", [0.02, 0.2])
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_are_found_whatever_the_size_of_the_logits(family: str, deviation: float) -> None:
    head = Policy(model_of(family, deviation)).head
    _, scale, soft_cap, has_bias = FAMILIES[family]
    assert head.logit_scale == pytest.approx(scale, rel=1e-6)
    assert head.soft_cap == (soft_cap and pytest.approx(soft_cap, rel=1e-6))
    assert (getattr(head.module, "bias", None) is not None) == has_bias


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_equal_those_of_the_model(family: str) -> None:
    model, batch = model_of(family), mixed_batch()
    weights = torch.randn(batch.loss_mask.shape[0], dtype=torch.float64)
    weights *= batch.loss_mask
    expected, got = torch.zeros_like(weights), torch.zeros_like(weights)
    start = 0
    for row in range(batch.num_rows):
        tokens = batch.tokens[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]].long()
        length = int(batch.response_lengths[row])
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        every = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        expected[start : start + length] = every[len(every) - length :].detach()
        of_row = weights[start : start + length]
        (every[len(every) - length :] * of_row).sum().backward()
        start += length
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    policy = Policy(model)
    for micro in plan_micro_batches(batch, 40):
        positions = response_positions(batch, micro)
        values = policy.logprobs(micro)[0]
        (values * weights[positions]).sum().backward()
        got[positions] = values.detach().double()
    mask = batch.loss_mask != 0
    # caps and scales are fitted in float32 where the model computes its logits in it
    torch.testing.assert_close(got[mask], expected[mask], rtol=0, atol=1e-6)
    assert gradients.keys() == {n for n, p in model.named_parameters() if p.grad is not None}
    for name, parameter in model.named_parameters():
        if name in gradients:
            wanted = gradients[name]
            largest = max(1.0, wanted.abs().max().item())
            torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=2e-6 * largest)


def test_the_probe_of_the_weights_has_the_models_logits() -> None:
    for family in FAMILIES:
        model = model_of(family)
        ids = [3, 4, 5, 6, 7]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        [(values, deviation)] = Policy(model).sequence_logprobs([ids])
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert values == pytest.approx(wanted.tolist(), abs=1e-6)
        assert deviation == pytest.approx(logits.std(-1).mean().item(), rel=1e-6)


def odd_model(change: Any, owner: str = "model") -> Any:
    """Return a model whose logits, or head, another function changes."""
    model = tiny_model()
    if owner == "head":
        model.lm_head = change(16, 16, bias=False)
        return model
    forward = model.forward

    def changed(*arguments: Any, **options: Any) -> Any:
        output = forward(*arguments, **options)
        output.logits = change(model, output.logits)
        return output

    model.forward = changed
    return model


class LearnedScale(torch.nn.Linear):
    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.logit_scale = torch.nn.Parameter(torch.ones(sizes[1]))  # does not show in the logits


class Cubed(torch.nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden + hidden**3)


def by_parameter(model: Any, logits: torch.Tensor) -> torch.Tensor:
    return logits * model.model.norm.weight.mean()


REFUSED = {
    "a parameter of the head": (LearnedScale, "head", r"by lm_head\.logit_scale, which would not"),
    "a parameter elsewhere": (by_parameter, "model", "by parameters, which would not be trained"),
    "an offset": (lambda _, z: z + 1.0, "model", "by more than a scale and a soft cap"),
    "a sign": (lambda _, z: -z, "model", "by more than a scale and a soft cap"),
    "a hard cap": (lambda _, z: z.clamp(-40, 40), "model", "by more than a scale"),
    "masked tokens": (
        lambda _, z: torch.cat([z[..., :-1], z[..., -1:] - 9], -1), "model", "by more than"
    ),
    "fewer tokens": (lambda _, z: z[..., :-1], "model", r"to a shape of \(1, 8, 15\)"),
    "another function": (Cubed, "head", r"largest difference of its logits"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_heads_are_refused_by_what_they_do(name: str) -> None:
    change, owner, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"changes its logits after the LM head .*{message}"):
        Policy(odd_model(change, owner))


def test_a_head_that_is_not_called_is_refused() -> None:
    model = tiny_model()
    head, model.lm_head = model.lm_head, torch.nn.Identity()
    model.get_output_embeddings = lambda: head
    with pytest.raises(ValueError, match="without calling it"):
        find_head(model, nullcontext)
