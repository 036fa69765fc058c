"""A residual stream in bfloat16: where it applies, and how much it rounds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from _memory import config_of
from _training import folder as folder  # a fixture
from _training import settings

from skyrl_fast.train.model.models import make_models
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.model.residual_stream import round_residual_stream
from skyrl_fast.train.parallel.ranks import SINGLE_RANK

pytestmark = pytest.mark.spec("memory.residual-dtype")

IDS = [1, 5, 9, 33, 2, 17, 250, 8]


def model_of(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32).eval()


def inputs_of_layers(model: Any, *, autocast: bool) -> list[torch.dtype]:
    found: list[torch.dtype] = []
    for layer in model.base_model.layers:
        layer.register_forward_pre_hook(lambda _, arguments: found.append(arguments[0].dtype))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(torch.tensor([IDS]))
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_every_layer_gets_16_bits_under_autocast_alone(name: str) -> None:
    model = model_of(name)
    assert set(inputs_of_layers(model, autocast=True)) == {torch.float32}
    model = model_of(name)
    round_residual_stream(model)
    assert set(inputs_of_layers(model, autocast=True)) == {torch.bfloat16}
    model = model_of(name)
    round_residual_stream(model)
    assert set(inputs_of_layers(model, autocast=False)) == {torch.float32}


def errors(*, rounded: bool) -> tuple[float, float]:
    """Return mean error of log-probabilities, and relative error of the gradient, of bfloat16."""
    values, gradients = [], []
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of("qwen3")
        with torch.no_grad():
            model.lm_head.weight.mul_(20)  # logits of a standard deviation of about 2
        if rounded:
            round_residual_stream(model)
        policy = Policy(model, dtype=dtype)
        ids = torch.arange(64)[None] * 7 % 500
        with policy.autocast():
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = hidden.float() @ model.lm_head.weight.T
        found = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
        weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
        (found * weights).mean().backward()
        values.append(found.detach())
        parameters = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        gradients.append(torch.cat(parameters))
    gradient = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    return float((values[1] - values[0]).abs().mean()), gradient


def test_rounding_is_of_the_order_of_that_of_the_products() -> None:
    """With 24 layers, 1.2 to 1.4 times the errors of products in 16 bits were measured."""
    for before, after in zip(errors(rounded=False), errors(rounded=True), strict=True):
        assert 0.5 * before < after < 2.5 * before < 0.1


@pytest.mark.parametrize("value", ["float32", "auto"])
def test_setting_applies_to_policy_reference_and_critic(folder: Path, value: str) -> None:
    config = settings(
        folder,
        "run",
        "trainer.policy.dtype=bfloat16",
        f"trainer.residual_dtype={value}",
        "trainer.algorithm.use_kl_loss=true",
        "trainer.algorithm.advantage_estimator=gae",
        f"trainer.critic.model.path={folder}/model",
    )
    models = make_models(config, None, 8, SINGLE_RANK)
    assert models.reference is not None and models.critic is not None
    expected = torch.bfloat16 if value == "auto" else torch.float32
    policy = models.trained[None].policy
    for model in (policy.model, models.reference.model, models.critic.model.backbone):
        embedding = model.get_input_embeddings()
        with torch.autocast("cpu", torch.bfloat16):
            assert embedding(torch.tensor([1])).dtype == expected


def test_trees_work_with_it() -> None:
    model = model_of("qwen3")
    round_residual_stream(model)
    policy = Policy(model, dtype=torch.bfloat16, tree=True)
    reference = Policy(model_of("qwen3"), dtype=torch.float32)
    expected = reference.sequence_logprobs([IDS])[0][0]
    assert policy.sequence_logprobs([IDS])[0][0] == pytest.approx(expected, abs=0.05)
