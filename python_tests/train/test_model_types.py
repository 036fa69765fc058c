"""Types of models that once were accepted and wrong, or failed without a reason."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.24")

from scripts.tiny_models import tiny_model
from skyrl_fast.train.model.policy import Policy, remove_dropout


@pytest.mark.spec("loss.causal")
def test_a_prefix_that_sees_later_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="CpmAntForCausalLM, whose hidden states depend on later"):
        Policy(tiny_model("cpmant"))


@pytest.mark.parametrize("training", [False, True])
def test_decoders_of_encoder_decoders_are_trained_in_rows(training: bool) -> None:
    # their backbone does not say what its embeddings are
    model = tiny_model("bart").train(training)
    remove_dropout(model)
    assert not Policy(model, tree=None).tree


@pytest.mark.spec("loss.training-mode")
def test_sampled_experts_have_the_gradients_of_evaluation_mode() -> None:
    model = tiny_model("phimoe").double()
    ids = torch.arange(40, 60)[None]

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = gradient()
    remove_dropout(model.train())
    torch.testing.assert_close(gradient(), expected)
