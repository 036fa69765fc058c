"""Vision-language models trained on text: only the language model is, and stays what it is in."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from _rows import full_logprobs, mixed_batch
from _vision_language import (
    FAMILIES,
    IMAGE,
    TEXT,
    VIDEO,
    language_model_of,
    vision_language_config,
    vision_language_model,
)
from _weights import change_adapter
from safetensors.torch import load_file

from skyrl_fast.batch import StepBatch
from skyrl_fast.config import AlgorithmConfig, OptimizerConfig
from skyrl_fast.config.model_folder import find_auto_class
from skyrl_fast.config.settings import LoraConfig
from skyrl_fast.rollout.engine.from_settings import (
    read_linear_names,
    read_positions,
    read_vocab_size,
)
from skyrl_fast.train.memory.activations import activation_memory, model_size
from skyrl_fast.train.model.critic import load_value_model
from skyrl_fast.train.model.loading import load_model
from skyrl_fast.train.model.lora import add_adapter
from skyrl_fast.train.model.micro_batch import plan_micro_batches, response_positions
from skyrl_fast.train.model.optimizer import Optimizer
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.update import update_policy

CPU = torch.device("cpu")
TREES = {
    "gemma3",
    "gemma4",
    "llama4",
    "mistral3",
    "qwen3_5",
    "internvl",
    "glm4v",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
}
PROCESSOR = {"preprocessor_config.json": {"image_processor_type": "Fast"}, "chat_template.json": {}}


@pytest.mark.spec("sync.language-model-only")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("training", [False, True])
def test_rows_and_trees_equal_each_row_alone(family: str, training: bool) -> None:
    model, batch = vision_language_model(family, torch.float64), mixed_batch()
    weights = torch.linspace(-1, 1, batch.loss_mask.shape[0], dtype=torch.float64)
    weights *= batch.loss_mask
    expected = full_logprobs(language_model_of(model, family), batch)
    (expected * weights).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.train(training)
    for tree in (False, None):
        model.zero_grad()
        policy = Policy(model, tree=tree)
        assert policy.tree == (tree is None and family in TREES)
        got = torch.zeros_like(weights)
        for micro in plan_micro_batches(batch, 40, tree=policy.tree):
            values, positions = policy.logprobs(micro)[0], response_positions(batch, micro)
            (values.double() * weights[positions]).sum().backward()
            got[positions] = values.detach().double()
        mask = batch.loss_mask != 0
        # some norms, routers and states are computed in float32 whatever the model's dtype
        torch.testing.assert_close(got[mask], expected.detach()[mask], rtol=0, atol=1e-6)
        trained = dict(policy.trained_parameters())
        assert {n for n, p in trained.items() if p.grad is not None} == gradients.keys()
        for name, wanted in gradients.items():
            largest = max(1.0, wanted.abs().max().item())
            torch.testing.assert_close(trained[name].grad, wanted, rtol=0, atol=2e-6 * largest)
    assert all(module.training == training for module in model.modules())


def make_folder(family: str, folder: Path) -> Path:
    vision_language_model(family).save_pretrained(folder)
    for name, content in PROCESSOR.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_changes_the_language_model_only(family: str, tmp_path: Path) -> None:
    folder = make_folder(family, tmp_path / "model")
    policy = Policy(load_model(str(folder), device=CPU))
    assert set(policy.frozen_parts) == FAMILIES[family][-1]
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    optimizer = Optimizer(policy, OptimizerConfig(lr=1e-2), total_steps=1)
    batch = mixed_batch()
    update_policy(policy, optimizer, batch, algorithm=AlgorithmConfig(), mini_batch_size=2)
    parts = tuple(f"{part}." for part in policy.frozen_parts)
    moved = {n for n, p in policy.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved and not any(name.startswith(parts) for name in moved)
    assert any("layers.0." in name for name in moved) and any("lm_head" in name for name in moved)
    assert_saved_as_loaded(policy, folder, tmp_path / "saved")


def assert_saved_as_loaded(policy: Policy, source: Path, folder: Path) -> None:
    """Compare names in files with those of the checkpoint, values with the model's, and sent."""
    policy.save(folder)
    files, before = load_file(folder / "model.safetensors"), load_file(source / "model.safetensors")
    assert {n: v.shape for n, v in files.items()} == {n: v.shape for n, v in before.items()}
    again = load_model(str(folder), device=CPU)
    assert type(again) is type(policy.model)
    assert again.config.architectures == [type(again).__name__]
    weights = dict(policy.model.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in again.named_parameters())
    for name, content in PROCESSOR.items():
        assert json.loads((folder / name).read_text()) == content
    sent = dict(policy.named_weights())
    assert all(torch.equal(value, files[name]) for name, value in sent.items())
    others = {name for name, p in weights.items() if not p.requires_grad}
    assert others and len(sent) < len(files)
    left = files.keys() - sent.keys()
    assert {n for n in left if not torch.equal(files[n], before[n])} == set()


@pytest.mark.spec("sync.saved-class")
def test_processor_files_outlive_the_folder_that_they_are_from(tmp_path: Path) -> None:
    folder = make_folder("internvl", tmp_path / "model")
    policy = Policy(load_model(str(folder), device=CPU))
    for name in PROCESSOR:
        (folder / name).unlink()
    policy.save(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} >= PROCESSOR.keys()


@pytest.mark.spec("sync.named-class")
def test_the_auto_class_is_the_one_that_the_checkpoint_names() -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig

    config: Any = vision_language_config("qwen3_5")  # has a causal LM, too
    assert find_auto_class(config) is AutoModelForImageTextToText
    config.architectures = ["Qwen3_5ForCausalLM"]
    assert find_auto_class(config) is AutoModelForCausalLM
    config.architectures = None
    assert find_auto_class(config) is AutoModelForCausalLM
    assert find_auto_class(LlamaConfig()) is AutoModelForCausalLM
    config = vision_language_config("qwen3_vl")
    config.architectures = None
    assert find_auto_class(config) is AutoModelForImageTextToText


@pytest.mark.spec("sync.images-refused")
@pytest.mark.parametrize("token", [IMAGE, VIDEO])
def test_images_in_prompts_are_refused(token: int) -> None:
    policy, batch = Policy(vision_language_model("qwen3_vl")), mixed_batch()
    tokens = batch.tokens.clone()
    first = int(batch.cu_seqlens[3])
    tokens[first + 1] = token
    with pytest.raises(ValueError, match=f"row 3: expected text, got token {token}"):
        policy.batch_logprobs(batch.with_(tokens=tokens))
    optimizer = Optimizer(policy, OptimizerConfig(), total_steps=1)
    with pytest.raises(ValueError, match=f"row 3: expected text, got token {token}"):
        update_policy(
            *(policy, optimizer, batch.with_(tokens=tokens)),
            algorithm=AlgorithmConfig(),
            mini_batch_size=2,
        )


@pytest.mark.spec("sync.images-refused")
def test_a_sampled_image_token_is_trained_as_any_other() -> None:
    model, batch = vision_language_model("internvl"), mixed_batch()
    tokens = batch.tokens.clone()
    tokens[int(batch.cu_seqlens[1]) - 1] = IMAGE  # the last of the first row, which is trained
    batch = batch.with_(tokens=tokens)
    with torch.no_grad():
        expected = full_logprobs(model, batch.rows([1, 3]))
    got = Policy(model).batch_logprobs(batch.rows([1, 3]))
    mask = batch.rows([1, 3]).loss_mask != 0
    torch.testing.assert_close(got[mask], expected[mask], rtol=0, atol=1e-5)  # float32
    assert Policy(model).batch_logprobs(batch)[3] < 0


def test_a_sampled_image_token_may_be_in_later_prompts_and_in_filtered_rows() -> None:
    prompts = [[5, 6], [5, 6, 7, IMAGE, 8], [9]]
    responses = [[7, IMAGE], [4, 5], [IMAGE, 6]]
    output = {
        "prompt_token_ids": prompts,
        "response_ids": responses,
        "loss_masks": [[1, 1], [1, 1], [0, 0]],
        "rewards": [0.0, 1.0, 1.0],
        "rollout_logprobs": [[-1.0, -1.0]] * 3,
        "trajectory_ids": [("a", 0), ("a", 0), ("a", 1)],
        "is_last_step": [False, True, True],
    }
    batch = StepBatch.from_generator_output(output, step_wise=True)
    assert (Policy(vision_language_model("internvl")).batch_logprobs(batch)[:4] < 0).all()


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "mistral3", "gemma3"])
def test_the_critic_is_a_language_model(family: str, tmp_path: Path) -> None:
    folder = make_folder(family, tmp_path / "model")
    critic = load_value_model(str(folder), device=CPU)
    assert critic.value_head.in_features == TEXT["hidden_size"]
    ids = torch.arange(5)[None]
    with torch.no_grad():
        hidden = load_model(str(folder), device=CPU).get_decoder()(input_ids=ids).last_hidden_state
        assert torch.equal(critic.backbone(input_ids=ids).last_hidden_state, hidden)
        critic.backbone.save_pretrained(tmp_path / "saved")
    again = load_value_model(str(tmp_path / "saved"), device=CPU)
    weights = dict(critic.backbone.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in again.backbone.named_parameters())


@pytest.mark.spec("sync.language-model-only", "lora.files")
@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])  # names of modules are shared, or not
def test_an_adapter_is_of_the_language_model(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder, batch = make_folder(family, tmp_path / "model"), mixed_batch()
    model = load_model(str(folder), device=CPU)
    lora = LoraConfig(rank=2, exclude_modules=["down_proj"])
    add_adapter(model, lora, base=str(folder))
    policy = Policy(model)
    change_adapter(policy)
    names = [name for name, _ in policy.trained_parameters()]
    assert len(names) == 2 * 6 * TEXT["num_hidden_layers"]  # of all linear modules but one
    assert all(name.startswith("model.language_model.") for name in names)
    assert not any("down_proj" in name for name in names)
    parts = tuple(f"{part}." for part in policy.frozen_parts)
    assert not any(name.startswith(parts) for name, _ in policy.named_weights())
    policy.save(tmp_path / "adapter")
    assert not any((tmp_path / "adapter" / name).exists() for name in PROCESSOR)
    loaded = peft.PeftModel.from_pretrained(
        load_model(str(folder), device=CPU), str(tmp_path / "adapter")
    )
    with torch.no_grad():
        expected = full_logprobs(loaded, batch) * batch.loss_mask
    # float32; PEFT adds in another order
    torch.testing.assert_close(policy.batch_logprobs(batch), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "family", ["qwen3_vl", "llama4", pytest.param("gemma3", marks=pytest.mark.slow)]
)
def test_the_memory_is_that_of_a_language_model_and_frozen_weights(family: str) -> None:
    model = vision_language_model(family)
    policy = Policy(model)
    size = model_size(model.config)
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert size.trained_parameters == sum(p.numel() for _, p in policy.trained_parameters())
    assert 0 < size.trained_parameters < size.parameters
    assert (size.vocab_size, size.hidden_size) == (TEXT["vocab_size"], TEXT["hidden_size"])
    options: Any = {"dtype": torch.float32, "gradient_checkpointing": True}
    of_text = activation_memory(model.config.get_text_config(), 48, **options)
    assert activation_memory(model.config, 48, **options) == of_text


@pytest.mark.parametrize("family", ["gemma3", "internvl"])
def test_layers_are_checkpointed(family: str, tmp_path: Path) -> None:
    folder, batch = make_folder(family, tmp_path / "model"), mixed_batch()
    gradients = []
    for checkpointed in (False, True):
        model = load_model(str(folder), device=CPU, gradient_checkpointing=checkpointed)
        policy = Policy(model)
        for micro in plan_micro_batches(batch, 1000):
            policy.logprobs(micro)[0].sum().backward()
        gradients.append({n: p.grad for n, p in policy.trained_parameters()})
    assert model.training
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_settings_of_an_engine_are_those_of_the_language_model(tmp_path: Path) -> None:
    folder = str(make_folder("gemma3", tmp_path))
    assert read_positions(folder) == TEXT["max_position_embeddings"]
    assert read_vocab_size(folder) == TEXT["vocab_size"]
    names = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert read_linear_names(folder) == names  # the tower has others, too
