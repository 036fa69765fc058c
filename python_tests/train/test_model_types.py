"""docs/reference/models.md: its types are transformers', and it says what is measured."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.24")

from scripts.models_page import (
    EXACT,
    MEASURED,
    PADDED,
    PAGE,
    measure,
    model_types,
    page,
    read_page,
    wrong,
)
from scripts.tiny_models import tiny_model
from skyrl_fast.train.model.loading import remove_dropout
from skyrl_fast.train.model.policy import Policy

RESULTS = read_page(PAGE.read_text(encoding="utf-8"))
# A window, a vision-language model, a state, a decoder of an encoder-decoder.
MEASURED_AGAIN = ("gemma2", "gemma3", "qwen3_next", "bart")


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


def test_page_has_every_type() -> None:
    assert list(RESULTS) == model_types(), "run python -m scripts.models_page"


def test_nothing_is_accepted_and_wrong() -> None:
    assert not wrong(RESULTS)


@pytest.mark.spec("loss.causal", "loss.lm-head", "tree.packed-rows", "tree.equal-gradients")
@pytest.mark.parametrize("kind", MEASURED_AGAIN)
def test_page_says_what_is_measured(kind: str) -> None:
    (again,) = read_page(page({kind: measure(kind)})).values()
    assert [again[name] for name in MEASURED] == [RESULTS[kind][name] for name in MEASURED]


def test_faults_are_found_and_reasons_are_kept() -> None:
    cells = dict.fromkeys(MEASURED, EXACT)
    results = {
        "a": {**cells, "packed": PADDED, "trees": "WRONG: relative error 1.0e-01"},
        "b": {**cells, "trees": "trainer.rows: no", "engine": "vLLM: no"},
        "c": {"loads": "no tiny model"},
        "d": {**cells, "engine": "vLLM: no ['</call>', '<|end|>', '<|of|>'] in /a/model/ids.json"},
    }
    again = read_page(page(results))
    assert wrong(again) == {"a": {"trees": "WRONG: relative error 1.0e-01"}}
    assert again["b"] == results["b"]
    assert again["d"]["engine"] == "vLLM: no ['/call', '/end/', '/of/'] in …"
    assert read_page(page(again)) == again
    assert set(again["c"].values()) == {"no tiny model", "not tried"}
