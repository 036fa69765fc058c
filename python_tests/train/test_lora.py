"""LoRA: gradients, merged weights and files of an adapter, and runs that train one."""

import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_fast.commands import export

pytest.importorskip("peft")

import peft
from _fakes import FakeRollouts, FakeTokenizer, tiny_model
from _memory import allocated_peak, config_of
from _rank_loading import file_sizes
from _rows import full_logprobs, mixed_batch
from _settings import NEEDED
from _training import RESUME, Recorder, assert_same_files, dies_at, dying, settings, steady, train
from _training import folder as folder  # a fixture
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from scripts.tiny_models import tiny_model as tiny_type
from skyrl_fast import cli
from skyrl_fast.batch import StepBatch
from skyrl_fast.config import OptimizerConfig, as_config, load_config
from skyrl_fast.config.modes import EngineWeights
from skyrl_fast.config.settings import LoraConfig, to_dict
from skyrl_fast.rollout.engine.weights.receipt import tensor_digest
from skyrl_fast.train.checkpoint.model_export import read_base_model, save_merged, write_merged
from skyrl_fast.train.model import critic as critic_module
from skyrl_fast.train.model import models as models_module
from skyrl_fast.train.model.base_weights import base_weights_digest
from skyrl_fast.train.model.critic import Critic, ValueModel, add_to_base
from skyrl_fast.train.model.loading import load_model
from skyrl_fast.train.model.lora import (
    CRITIC,
    NAME,
    FrozenBase,
    adapter_of,
    add_adapter,
    add_adapters,
    is_adapter,
    merge,
    save_adapter,
)
from skyrl_fast.train.model.micro_batch import plan_micro_batches, response_positions
from skyrl_fast.train.model.models import make_models
from skyrl_fast.train.model.policy import Policy, WithoutAdapter
from skyrl_fast.train.parallel.ranks import SINGLE_RANK
from skyrl_fast.train.setup.errors import SetupError
from skyrl_fast.train.setup.given_objects import with_absolute_paths

LORA = LoraConfig(rank=3, alpha=4)
RUN = ["trainer.policy.model.lora.rank=4", "trainer.algorithm.use_kl_loss=true"]
ADAPTER = Path("policy/adapter_model.safetensors")
SCALE = 4 / 3


def make_model(
    lora: LoraConfig = LORA,
    *,
    dtype: torch.dtype = torch.float64,
    folder: Path | None = None,
    base: str = "base",
    tied: bool = False,
) -> Any:
    """Return a model with an adapter: that of the folder, or one whose B is not 0."""
    model = tiny_model(tied=tied).to(dtype)
    torch.manual_seed(0)
    add_adapter(model, lora, base=base, folder=folder)
    if folder is None:
        for name, parameter in matrices(model).items():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.2)
    return model


def matrices(model: Any) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if is_adapter(name)}


def merge_into_copy(model: Any) -> Any:
    """Return a model without an adapter, of the merged weights."""
    plain = tiny_model().to(model.dtype)
    plain.load_state_dict(merge(model, model.state_dict()))
    return plain


@pytest.mark.spec("lora.gradient")
@pytest.mark.parametrize("tree", [False, True])
def test_gradients_are_those_of_the_merged_weights(tree: bool) -> None:
    model = make_model()
    plain = merge_into_copy(model)
    batch = mixed_batch()
    weights = torch.linspace(-1, 1, batch.loss_mask.shape[0], dtype=torch.float64)
    (full_logprobs(plain, batch) * batch.loss_mask * weights).sum().backward()
    policy = Policy(model, tree=tree)
    for micro in plan_micro_batches(batch, 40, tree=tree):
        values, _ = policy.logprobs(micro)
        (values.double() * weights[response_positions(batch, micro)]).sum().backward()
    of_merged = {name: p.grad for name, p in plain.named_parameters()}
    own = matrices(model)
    assert len(own) == 2 * 7 * plain.config.num_hidden_layers  # all linear modules
    for name, a in own.items():
        if ".lora_A." in name:
            b = own[name.replace("lora_A", "lora_B")]
            gradient = of_merged[name.replace("lora_A.default.", "")]
            # log-probabilities are returned in float32, so that their gradients are rounded to it
            torch.testing.assert_close(a.grad, SCALE * b.T @ gradient, rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(b.grad, SCALE * gradient @ a.T, rtol=1e-6, atol=1e-9)
    assert all(p.grad is None for name, p in model.named_parameters() if not is_adapter(name))


@pytest.mark.spec("lora.gradient")
@pytest.mark.parametrize("use_rslora", [False, True])
def test_merged_weights_are_those_of_peft(use_rslora: bool, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "base")
    lora = replace(LORA, use_rslora=use_rslora, target_modules=["q_proj", "down_proj"])
    policy = Policy(make_model(lora, dtype=torch.float32, base=str(tmp_path / "base")))
    policy.save(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(tiny_model(), str(tmp_path / "adapter"))
    batch = mixed_batch()
    with torch.no_grad():
        expected = full_logprobs(loaded, batch) * batch.loss_mask
    torch.testing.assert_close(policy.batch_logprobs(batch), expected, atol=2e-5, rtol=0)
    merged = loaded.merge_and_unload().state_dict()
    sent = dict(policy.named_weights())
    assert sent.keys() == merged.keys() - {"lm_head.weight"} or sent.keys() == merged.keys()
    for name, value in sent.items():
        torch.testing.assert_close(value, merged[name], rtol=1e-6, atol=1e-7)
    names = set(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert names == set(dict(policy.named_weights(adapter=True)))


@pytest.mark.spec("lora.gradient")
@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.down_proj"])  # with bias, without
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_layer_computes_what_pefts_does_in_less_memory(name: str, dtype: torch.dtype) -> None:
    layer = make_model(dtype=dtype).get_submodule(f"model.layers.0.{name}")
    inputs = torch.randn(2, 64, layer.in_features, dtype=dtype)
    matrices = (layer.lora_A[NAME].weight, layer.lora_B[NAME].weight)
    weights = torch.randn(2, 64, layer.out_features, dtype=dtype)

    def compute(forward: Any) -> tuple[list[torch.Tensor], int]:
        def run() -> list[torch.Tensor]:
            x = inputs.clone().requires_grad_()
            with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16, cache_enabled=False):
                output = forward(x)
            return [output, *torch.autograd.grad(output, (x, *matrices), weights)]

        return run(), allocated_peak(run)

    own, peak = compute(layer.forward)
    expected, peak_of_peft = compute(partial(type(layer).forward, layer))
    rounding = 1e-12
    if dtype == torch.bfloat16:
        rounding = 2**-6  # PEFT rounds the product, and that with s, before it adds it
    for value, other in zip(own, expected, strict=True):
        largest = float(other.detach().abs().max())
        torch.testing.assert_close(value, other, rtol=0, atol=rounding * largest)
    assert peak < peak_of_peft


@pytest.mark.spec("lora.frozen-base")
def test_the_reference_is_the_model_without_its_adapter() -> None:
    model = make_model(dtype=torch.float32)
    policy, batch = Policy(model), mixed_batch()
    trained = policy.batch_logprobs(batch)
    expected = Policy(tiny_model()).batch_logprobs(batch)
    assert not torch.allclose(trained, expected, atol=1e-3)
    # the same products in the same order
    assert torch.equal(WithoutAdapter(policy).batch_logprobs(batch), expected)
    assert torch.equal(policy.batch_logprobs(batch), trained)
    assert all(p.requires_grad == is_adapter(name) for name, p in model.named_parameters())


def test_a_frozen_base_keeps_its_dtype_and_the_adapter_has_float32(tmp_path: Path) -> None:
    model = make_model(dtype=torch.bfloat16)
    with torch.no_grad():
        # Hidden states of this size differ by more than the checks allow in bfloat16.
        model.get_input_embeddings().weight.mul_(30)
    assert {p.dtype for p in matrices(model).values()} == {torch.float32}
    policy = Policy(model, dtype=torch.bfloat16, tree=True)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for micro in plan_micro_batches(mixed_batch(), 1000, tree=True):
        policy.logprobs(micro)[0].sum().backward()
    assert [name for name, _ in policy.trained_parameters()] == list(matrices(model))
    assert all(p.grad.dtype == torch.float32 for _, p in policy.trained_parameters())
    torch.optim.SGD([p for _, p in policy.trained_parameters()], lr=1.0).step()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == set(matrices(model))
    merged = dict(policy.named_weights())["model.layers.0.self_attn.q_proj.weight"]
    assert merged.dtype == torch.float32  # rounded once, by the engine's dtype


@pytest.mark.spec("memory.residual-dtype")
@pytest.mark.parametrize(
    ("setting", "dtype"), [("float32", torch.float32), ("auto", torch.bfloat16)]
)
def test_sums_between_layers_of_a_frozen_base(
    setting: str, dtype: torch.dtype, folder: Path
) -> None:
    changes = ["trainer.policy.dtype=bfloat16", f"trainer.residual_dtype={setting}"]
    config = settings(folder, "run", *RUN, *changes)
    policy = make_models(config, None, 8, SINGLE_RANK).trained[None].policy
    found: list[torch.dtype] = []
    second = policy.model.model.layers[1]
    second.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].dtype))
    policy.batch_logprobs(mixed_batch())
    assert set(found) == {dtype}


@pytest.mark.spec("memory.frozen-base")
@pytest.mark.parametrize(("tied", "small_part"), [(False, 1 << 20), (True, 64)])
def test_the_frozen_base_leaves_its_device_and_comes_back(tied: bool, small_part: int) -> None:
    policy, batch = Policy(make_model(dtype=torch.float32, tied=tied), tree=True), mixed_batch()
    policy.frozen_base = FrozenBase(policy.model, small_part=small_part)

    def digests() -> dict[str, str]:  # of copies, as NumPy's views cannot be resized
        return {n: tensor_digest(p.detach().clone()) for n, p in policy.model.named_parameters()}

    before = digests()
    expected = policy.batch_logprobs(batch)
    for _ in range(2):
        policy.offload_base()
        policy.offload_base()
        for name, parameter in policy.model.named_parameters():
            assert bool(parameter.untyped_storage().nbytes()) == is_adapter(name)
        with pytest.raises(RuntimeError, match=r"not allocated|for storage of size 0"):
            policy.batch_logprobs(batch)
        adapter = {n: tensor_digest(p.clone()) for n, p in policy.adapter_weights(NAME).items()}
        assert adapter == {name: before[name] for name in adapter}
        storages = policy.frozen_base.storages
        assert storages is not None
        parts = [part for copy in storages.copies.values() for part in copy[:-1]]
        assert bool(parts) == (small_part == 64)
        assert all(part.numel().bit_count() == 1 for part in parts)
        policy.load_base()
        policy.load_base()
        assert digests() == before
        assert torch.equal(policy.batch_logprobs(batch), expected)


@pytest.mark.spec("lora.files")
def test_an_adapter_of_peft_is_loaded(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=3, lora_alpha=4, target_modules=["v_proj", "o_proj"])
    theirs = peft.get_peft_model(tiny_model(), config)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(str(tmp_path))
    batch = mixed_batch()
    with torch.no_grad():
        expected = full_logprobs(theirs, batch) * batch.loss_mask
    ours = Policy(make_model(dtype=torch.float32, folder=tmp_path))
    torch.testing.assert_close(ours.batch_logprobs(batch), expected, atol=2e-5, rtol=0)


def _rename(name: str) -> Any:
    def change(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        first = next(one for one in tensors if "lora_A" in one)
        tensors[name or "no.name"] = tensors.pop(first)
        save_file(tensors, path)

    return change


def _transpose(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = {name: value.T.contiguous() for name, value in load_file(path).items()}
    save_file(tensors, path)


def _set(name: str, value: Any) -> Any:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("r", 4), "lora.rank: expected 4"),
        (_set("lora_alpha", 8), "lora.alpha: expected 8"),
        (_set("use_rslora", True), "lora.use_rslora: expected True"),
        (_set("use_dora", True), "use_dora: expected False, got True"),
        (_set("bias", "all"), "bias: expected none, got all"),
        (_set("lora_dropout", 0.1), "lora_dropout: expected 0.0, got 0.1"),
        (_set("modules_to_save", ["lm_head"]), "modules_to_save: expected None"),
        (_set("rank_pattern", {"q_proj": 8}), "rank_pattern: expected {}"),
        (_set("alora_invocation_tokens", [5]), "alora_invocation_tokens: expected None"),
        (_set("init_lora_weights", "pissa"), "init_lora_weights: expected one that does not"),
        (_set("peft_type", "IA3"), "peft_type: expected LORA"),
        (_rename("no.name"), "got other names: "),
        (_transpose, "expected shape"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x"), "no PEFT"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "no PEFT adapter"),
    ],
)
def test_another_adapter_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    Policy(make_model(dtype=torch.float32)).save(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError, match=message):
        make_model(folder=tmp_path)


@pytest.mark.parametrize(
    ("targets", "excluded", "message"),
    [
        (["q_proj", "c_attn"], [], "target_modules: expected names of linear modules, got c_attn"),
        (["c_attn"], [], r"target_modules: expected names .*\(down_proj, .*q_proj.*got c_attn"),
        (["lm_head"], [], "target_modules: .*linear modules of the model's layers.*, got lm_head"),
        (["embed_tokens"], [], "target_modules: .*got model.embed_tokens"),
        (["all-linear"], ["gate"], "exclude_modules: expected names of linear modules, got gate"),
        (["all-linear"], ["mlp"], "exclude_modules: expected names of linear modules, got mlp"),
    ],
)
def test_other_targets_are_refused(targets: list[str], excluded: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model(replace(LORA, target_modules=targets, exclude_modules=excluded))


@pytest.mark.parametrize(
    ("file", "added", "message"),
    [
        ("adapter_config.json", {"peft_type": "LORA"}, "expected a model alone"),
        ("config.json", {"quantization_config": {"quant_method": "modelopt"}}, "of 16 or 32 bits"),
    ],
)
def test_a_base_has_neither_an_adapter_nor_codes(
    file: str, added: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Transformers loads such an adapter with it, and codes that it does not know as weights."""
    tiny_model().save_pretrained(tmp_path)
    path = tmp_path / file
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | added))
    with pytest.raises(ValueError, match=f"trainer.policy.model.path: .*{message}"):
        load_model(str(tmp_path), device=torch.device("cpu"))


@pytest.mark.spec("lora.files")
def test_layers_that_share_a_weight_are_refused() -> None:
    model = tiny_model()
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    with pytest.raises(ValueError, match="expected layers with weights of their own"):
        add_adapter(model, LORA, base="base")


@pytest.mark.spec("lora.files")
def test_settings_choose_the_modules_of_a_folders_adapter(tmp_path: Path) -> None:
    """Or the adapter would stay as it is, and the settings would be ignored."""
    lora = replace(LORA, target_modules=["q_proj", "v_proj"])
    Policy(make_model(lora, dtype=torch.float32)).save(tmp_path)
    for other, message in (
        (replace(LORA, target_modules=["q_proj"]), "target_modules: expected those of the adapter"),
        (replace(lora, exclude_modules=["v_proj"]), "exclude_modules: expected those of the adapt"),
        (replace(LORA, target_modules=["q_proj", "v_proj", "o_proj"]), "got o_proj"),
    ):
        with pytest.raises(ValueError, match=message):
            make_model(other, folder=tmp_path)
    for same in (lora, LORA):  # all that it has
        model = make_model(same, folder=tmp_path, base="moved")
        assert len(matrices(model)) == 2 * 2 * model.config.num_hidden_layers
        assert model.peft_config[NAME].base_model_name_or_path == "moved"


def test_modules_whose_weight_the_model_reads_itself_are_refused() -> None:
    def multiply(layer: Any, x: torch.Tensor) -> torch.Tensor:
        return layer.down_proj(layer.act_fn(layer.gate_proj(x)) * (x @ layer.up_proj.weight.T))

    model = make_model(dtype=torch.float32)
    for layer in model.model.layers:
        layer.mlp.forward = partial(multiply, layer.mlp)
    with pytest.raises(ValueError, match="got up_proj, whose adapters would not be trained"):
        Policy(model)


@pytest.mark.parametrize(
    "engines",
    [
        [],
        ["trainer.placement.colocate_all=false"],
        [
            "generator.inference_engine.run_engines_locally=false",
            "generator.inference_engine.external_server_urls=[http://a:1]",
        ],
    ],
)
def test_all_engines_get_the_adapter_alone_unless_it_is_to_be_merged(engines: list[str]) -> None:
    rank = ["trainer.policy.model.lora.rank=8", *engines]
    assert load_config(None, [*NEEDED, *rank]).engine_weights is EngineWeights.ADAPTER
    merged = "trainer.policy.model.lora.weight_sync=merged"
    assert load_config(None, [*NEEDED, *rank, merged]).engine_weights is EngineWeights.MERGED
    assert load_config(None, [*NEEDED, *engines]).engine_weights is EngineWeights.ALL


@pytest.mark.spec("lora.files")
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_all_modules_of_a_mixture_are_those_of_its_attention(kind: str, tmp_path: Path) -> None:
    """PEFT takes all-linear for fused experts and routers, too, which have no adapter here."""
    model = tiny_type(kind)
    add_adapters(model, replace(LORA, policies=["a", "b"]), base="base")
    save_adapter(
        model, {n: p for n, p in matrices(model).items() if adapter_of(n) == "b"}, tmp_path, "b"
    )
    modules = {name.partition(".lora_")[0].rpartition(".")[2] for name in matrices(model)}
    assert modules == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert len(matrices(model)) == 2 * 2 * 4 * model.config.num_hidden_layers
    loaded = peft.PeftModel.from_pretrained(tiny_type(kind), str(tmp_path))
    of_peft = {n: p for n, p in loaded.named_parameters() if is_adapter(n)}
    assert len(of_peft) == len(matrices(model)) / 2
    for name, value in of_peft.items():
        own = name.removeprefix("base_model.model.").replace(".default.", ".b.")
        assert torch.equal(value, matrices(model)[own])


@pytest.mark.spec("run.absolute-paths")
def test_ranks_in_other_folders_find_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("adapter").mkdir()
    config = with_absolute_paths(as_config({"trainer.policy.model.lora.path": "adapter"}))
    assert config.trainer.policy.model.lora.path == str(tmp_path / "adapter")


def test_excluded_modules_have_no_adapter() -> None:
    names = matrices(make_model(replace(LORA, exclude_modules=["k_proj", "up_proj"])))
    assert not [name for name in names if "k_proj" in name or "up_proj" in name]
    assert len(names) == 2 * 5 * tiny_model().config.num_hidden_layers


def test_a_resumed_run_equals_an_uninterrupted_one(folder: Path) -> None:
    expected = train(settings(folder, "expected", *RUN))
    with dying():
        train(settings(folder, "broken", *RUN), Recorder(dies_at(5)))
    outcome = train(settings(folder, "broken", RESUME, *RUN))
    assert steady(outcome.metrics) == steady(expected.metrics)
    assert_same_files(outcome, expected, ADAPTER, "optimizer.safetensors")
    last = steady(expected.metrics)[-1]
    assert last["policy/kl"] > 1e-4  # to the model without its adapter
    files = {path.name for path in (expected.checkpoint / "policy").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "tokenizer.txt"}
    # The adapter, with a new optimizer, in another run.
    path = f"trainer.policy.model.lora.path={expected.checkpoint}/policy"
    frozen = train(settings(folder, "next", *RUN, path, "trainer.policy.optimizer_config.lr=0"))
    one, two = (load_file(run.checkpoint / ADAPTER) for run in (expected, frozen))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert min(row["policy/kl"] for row in steady(frozen.metrics) if row["step"]) > 1e-4


CRITIC_RUN = [
    *RUN,
    "trainer.algorithm.advantage_estimator=gae",
    "trainer.critic.optimizer_config.lr=0.01",
]


def with_critic(model: Any, **options: Any) -> tuple[Policy, Critic]:
    """Return policy and critic on one base; B of the critic's adapter is not 0."""
    add_to_base(model, LORA, base="base")
    for name, parameter in matrices(model).items():
        if adapter_of(name) == CRITIC and ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.2)
    policy = Policy(model, **options)
    config = OptimizerConfig(lr=0.01)
    value_model = ValueModel(policy.backbone)
    critic = Critic(value_model, config, total_steps=9, mini_batch_size=2, policy=policy)
    return policy, critic


def with_returns(batch: StepBatch) -> StepBatch:
    returns = torch.linspace(-1, 2, batch.loss_mask.shape[0])
    return batch.with_(values=torch.zeros_like(returns), returns=returns)


@pytest.mark.spec("lora.critic")
@pytest.mark.parametrize("tree", [False, True])
def test_gradients_of_a_critic_on_the_base_are_those_of_peft(tree: bool) -> None:
    policy, critic = with_critic(make_model(), tree=tree)
    batch = with_returns(mixed_batch())
    critic.accumulate_gradient(batch)
    base = tiny_model().double().base_model
    config = peft.LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear")
    theirs = peft.get_peft_model(base, config)
    prefix = "base_model.model."
    others = {n.removeprefix(prefix): p for n, p in theirs.named_parameters() if p.requires_grad}
    own = {
        name.removeprefix("model.").replace(CRITIC, NAME): value
        for name, value in critic.trained_parameters()
        if is_adapter(name)
    }
    assert own.keys() == others.keys()
    with torch.no_grad():
        for name, value in own.items():
            others[name].copy_(value)
    head = critic.model.value_head.weight.detach().clone().requires_grad_()
    hidden = []
    for row in range(batch.num_rows):
        tokens = batch.tokens[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]].long()
        length = int(batch.response_lengths[row])
        states = theirs(input_ids=tokens[None]).last_hidden_state[0, :-1]
        hidden.append(states[len(states) - length :])  # those before each token
    values = (torch.cat(hidden) @ head.T)[:, 0]
    trained = batch.loss_mask != 0
    (0.5 * (values - batch.returns)[trained].square()).sum().div(trained.sum()).backward()
    # values are returned in float32, so that their gradients are rounded to it
    close = {"rtol": 2e-6, "atol": 1e-8}
    torch.testing.assert_close(critic.model.value_head.weight.grad, head.grad, **close)
    for name, value in own.items():
        torch.testing.assert_close(value.grad, others[name].grad, **close)
    of_critic = {id(value) for _, value in critic.trained_parameters()}
    rest = [p for p in policy.model.parameters() if id(p) not in of_critic]
    assert all(parameter.grad is None for parameter in rest)


@pytest.mark.spec("lora.critic")
def test_policy_and_critic_of_a_base_do_not_change_each_other() -> None:
    policy, critic = with_critic(make_model(dtype=torch.float32), tree=True)
    alone = Policy(make_model(dtype=torch.float32), tree=True)
    batch = with_returns(mixed_batch())
    assert critic.model.backbone is policy.backbone
    names = [name for name, _ in policy.trained_parameters()]
    assert names == [name for name, _ in alone.trained_parameters()]

    def bits() -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in policy.model.named_parameters()}

    for _ in range(2):
        before, values = bits(), critic.batch_values(batch)
        assert torch.equal(policy.batch_logprobs(batch), alone.batch_logprobs(batch))
        reference = WithoutAdapter(alone).batch_logprobs(batch)
        assert torch.equal(WithoutAdapter(policy).batch_logprobs(batch), reference)
        assert torch.equal(critic.batch_values(batch), values)
        critic.update(batch)
        changed = {name for name, value in bits().items() if not torch.equal(value, before[name])}
        assert changed == {name for name, _ in critic.trained_parameters()}
        assert not torch.equal(critic.batch_values(batch), values)
    for adapter in (False, True):  # what engines get
        sent, expected = (dict(one.named_weights(adapter=adapter)) for one in (policy, alone))
        assert sent.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in sent.items())


@pytest.mark.spec("lora.critic", "lora.files")
def test_a_critic_on_the_base_is_resumed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []
    load = models_module.load_model

    def counted(path: str, **options: Any) -> Any:
        loads.append(path)
        return load(path, **options)

    monkeypatch.setattr(models_module, "load_model", counted)
    monkeypatch.setattr(critic_module, "load_model", counted)
    changes = [*CRITIC_RUN, f"trainer.critic.model.path={folder}/model"]
    expected = train(settings(folder, "expected", *changes))
    assert len(loads) == 1  # also the reference

    with dying():
        train(settings(folder, "broken", *changes), Recorder(dies_at(5)))
    outcome = train(settings(folder, "broken", "trainer.resume_mode=latest", *changes))
    assert steady(outcome.metrics) == steady(expected.metrics)
    files = ["adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"]
    files += ["value_head.safetensors"]
    assert sorted(path.name for path in (expected.checkpoint / "critic").iterdir()) == files
    tensors = [Path("critic") / file for file in files if file.endswith(".safetensors")]
    for file in (ADAPTER, Path("optimizer.safetensors"), *tensors):
        one, two = (run.checkpoint / file for run in (outcome, expected))
        assert one.read_bytes() == two.read_bytes(), file
    adapters = [load_file(expected.checkpoint / of / ADAPTER.name) for of in ("policy", "critic")]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(float(value.abs().max()) > 1e-3 for value in adapters[1].values())  # B began at 0
    out = folder / "exported"
    assert cli.main(["export", str(expected.run_path), str(out), "--to", "adapter"]) == 0
    exported = load_file(out / ADAPTER.name)
    assert all(torch.equal(value, adapters[0][name]) for name, value in exported.items())


@pytest.mark.spec("lora.critic")
def test_a_critic_of_another_path_has_a_model_of_its_own(folder: Path) -> None:
    tiny_model(seed=3).save_pretrained(folder / "other")
    path = f"trainer.critic.model.path={folder}/other"
    config = settings(folder, "run", *CRITIC_RUN, path, "trainer.max_training_steps=1")
    assert not config.shares_critic
    assert (train(config).checkpoint / "critic/model.safetensors").is_file()


@pytest.mark.spec("memory.frozen-base")
def test_nothing_between_updates_needs_the_frozen_base(folder: Path) -> None:
    """Neither evaluations nor checkpoints; the numbers of a run do not change."""

    class ByTurns(FakeRollouts):
        async def sleep(self, policy: Policy) -> None:
            policy.load_base()

        async def update_weights(self, policy: Policy, *, version: int) -> dict[str, float]:
            policy.load_base()
            if version == 0:  # memory of a mapped file cannot be resized
                for parameter in policy.model.parameters():
                    parameter.data = parameter.data.clone()
            metrics = await super().update_weights(policy, version=version)
            policy.offload_base()
            return metrics

    class Maker(Recorder):
        async def __call__(self, config: Any, tokenizer: Any, model_path: str) -> FakeRollouts:
            return ByTurns(config, tiny_model(seed=1))

    changes = [*RUN, "trainer.ckpt_interval=1", "trainer.eval_interval=1"]
    runs = [
        train(settings(folder, name, *changes), maker)
        for name, maker in (("stays", None), ("turns", Maker()))
    ]
    assert steady(runs[0].metrics) == steady(runs[1].metrics)
    one, two = ((run.checkpoint / ADAPTER).read_bytes() for run in runs)
    assert one == two


def test_the_base_of_an_adapter_is_named_by_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL", "org/tiny")
    key = "trainer.policy.model.path"
    config = as_config(to_dict(as_config({key: "${oc.env:MODEL}"})))
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/tiny"}')
    assert read_base_model(config, tmp_path) == "org/tiny"
    assert read_base_model(as_config({key: "org/other"}), tmp_path / "none") == "org/other"


def test_a_merged_model_has_the_dtypes_of_its_base(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """A router's bias is float32 among weights of 16 bits."""
    lora, base = replace(LORA, target_modules=["q_proj"]), tmp_path / "base"
    tiny_type("glm4_moe").bfloat16().save_pretrained(base)
    model = load_model(str(base), device=torch.device("cpu"), dtype=torch.bfloat16)
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias += 1e-4
    model.save_pretrained(base)
    add_adapter(model, lora, base=str(base))
    save_adapter(model, matrices(model), tmp_path / "adapter")
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    write_merged(lora, str(base), tmp_path / "adapter", tmp_path / "tokenizer", tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    assert {str(value.dtype) for value in before.values()} == {"torch.bfloat16", "torch.float32"}
    assert before.keys() == after.keys()
    for name, value in before.items():  # B is 0
        assert value.dtype == after[name].dtype and torch.equal(value, after[name]), name


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_a_merged_model_is_written_layer_by_layer(
    tmp_path: Path, tiny_tokenizer: Any, kind: str
) -> None:
    """Experts are divided into those of the file, one tensor in the model."""
    lora, base = replace(LORA, target_modules=["q_proj"]), tmp_path / "base"
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "num_hidden_layers": 12}
    if kind == "qwen3_moe":
        sizes["mlp_only_layers"] = []
    AutoModelForCausalLM.from_config(config_of(kind, **sizes)).bfloat16().save_pretrained(base)
    model = load_model(str(base), device=torch.device("cpu"), dtype=torch.bfloat16)
    dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    whole = sum(value.nbytes for value in model.parameters())
    add_adapter(model, lora, base=str(base))
    for value in matrices(model).values():
        torch.nn.init.normal_(value)
    save_adapter(model, matrices(model), tmp_path / "adapter")
    save_merged(model, dtypes, tmp_path / "divided", file_bytes=whole // 3)
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    write = partial(write_merged, lora, str(base), tmp_path / "adapter", tmp_path / "tokenizer")
    peak = allocated_peak(lambda: write(tmp_path / "out"), file_sizes(base))
    # A layer: stored, in float32, and cast; it is a twelfth of the model.
    assert peak < whole / 2
    merged = merge(model, model.state_dict())
    assert len(list((tmp_path / "divided").glob("model-*-of-*.safetensors"))) > 2
    for written in ("divided", "out"):
        found = AutoModelForCausalLM.from_pretrained(tmp_path / written)
        for name, value in found.state_dict().items():
            assert value.dtype == dtypes[name], name
            assert torch.equal(value, merged[name].to(dtypes[name])), name


def test_a_run_is_exported_as_adapter_and_as_merged_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = train(settings(folder, "run", *RUN))
    run, out = outcome.run_path, folder / "exported"
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _: FakeTokenizer())
    # As after a resume with another base, which has written no checkpoint yet.
    changed = json.loads((run / "config.json").read_text())
    changed["trainer"]["policy"]["model"]["path"] = "another"
    (run / "config.json").write_text(json.dumps(changed))
    capsys.readouterr()  # what the run has printed
    for form in ("adapter", "model"):
        assert cli.main(["export", str(run), str(out / form), "--to", form]) == 0
    printed = capsys.readouterr()
    assert f"the model of {outcome.checkpoint}" in printed.out
    assert printed.err == ""  # no progress bars
    for name in ("adapter/adapter_model.safetensors", "model/model.safetensors"):
        assert (out / name).stat().st_mode == (out / "model/README.md").stat().st_mode, name
    adapter = peft.PeftModel.from_pretrained(tiny_model(), str(out / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(out / "model")
    batch = mixed_batch()
    with torch.no_grad():
        expected, base = full_logprobs(adapter, batch), full_logprobs(tiny_model(), batch)
        got = full_logprobs(merged, batch)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
    assert not torch.allclose(got, base, atol=1e-3)
    card = (out / "model/README.md").read_text()
    rewards = [row for row in steady(outcome.metrics) if "eval/all/avg_score" in row]
    assert str(folder) not in card  # the card is public
    assert card.startswith('---\nlibrary_name: "transformers"\n') and len(rewards) == 4
    for row in rewards:
        assert f"| {row['step']} | {row['eval/all/avg_score']:.3f} |" in card
    assert "| LoRA | rank 4, alpha 16 |" in card and f"torch {torch.__version__}" in card

    uploads: list[dict[str, str]] = []
    hub = SimpleNamespace(
        create_repo=lambda name, exist_ok: f"https://hub/{name}",
        upload_folder=lambda **options: uploads.append(options),
    )
    target = out / "pushed"
    arguments = ["export", str(outcome.checkpoint), str(target), "--to", "adapter"]
    parsed = cli.command_parser().parse_args([*arguments, "--push", "me/a"])
    assert export.run(parsed, hub=hub) == 0
    assert uploads == [{"repo_id": "me/a", "folder_path": str(target)}]
    assert "uploaded to https://hub/me/a" in capsys.readouterr().out

    complete = train(settings(folder, "complete", "trainer.max_training_steps=2"))
    for arguments, message in (
        ([str(run), str(target), "--to", "model"], "expected no such file or folder"),
        ([str(complete.run_path), str(out / "x"), "--to", "adapter"], "expected a LoRA adapter"),
        ([str(folder), str(out / "x"), "--to", "model"], "expected the folder of a run"),
        ([str(run), str(out / "x"), "--to", "batch", "--push", "a"], "--push: expected --to"),
        ([str(run), str(out / "x"), "--to", "model", "--min-reward", "1"], "--min-reward"),
    ):
        assert cli.main(["export", *arguments]) in (1, 2)
        assert message in capsys.readouterr().err
    assert cli.main(["export", str(complete.run_path), str(out / "full"), "--to", "model"]) == 0
    weights = (complete.checkpoint / "policy/model.safetensors").read_bytes()
    assert (out / "full/model.safetensors").read_bytes() == weights


def test_a_resume_without_the_rank_names_it(folder: Path) -> None:
    train(settings(folder, "run", *RUN, "trainer.max_training_steps=1"))
    resumed = settings(folder, "run", "trainer.resume_mode=latest")
    with pytest.raises(SetupError, match=r"a LoRA adapter; set \S*lora\.rank=4 to resume"):
        train(resumed)


def save_base(folder: Path, *, seed: int = 0, shard: str = "5GB") -> Path:
    tiny_model(seed=seed).save_pretrained(folder, max_shard_size=shard)
    return folder


def test_a_truncated_file_of_weights_is_named(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"base cannot be loaded: model\.safetensors: "):
        load_model(str(base), device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.spec("lora.base-weights")
def test_digest_of_base_weights_is_that_of_the_tensors_not_of_the_files(tmp_path: Path) -> None:
    digest = base_weights_digest(str(save_base(tmp_path / "one")))
    assert len(list(save_base(tmp_path / "parts", shard="20KB").glob("*.safetensors"))) > 1
    assert base_weights_digest(str(tmp_path / "parts")) == digest
    assert base_weights_digest(str(save_base(tmp_path / "other", seed=1))) != digest
    path = tmp_path / "one/model.safetensors"
    tensors = load_file(path)
    largest = max(tensors, key=lambda name: tensors[name].numel())
    for change in (
        {largest: tensors[largest].flatten().reshape(-1, 1)},
        {largest: tensors[largest].half()},
        {name: value + 1e-3 for name, value in tensors.items()},
    ):
        save_file({**tensors, **change}, path)
        assert base_weights_digest(str(tmp_path / "one")) not in ("", digest)
    assert base_weights_digest(str(tmp_path / "none")) == ""
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match=r"model\.safetensors: no safetensors file"):
        base_weights_digest(str(tmp_path / "one"))


@pytest.mark.spec("lora.base-weights")
@pytest.mark.parametrize("kind", ["adapter", "policies", "critic"])
def test_adapter_is_named_if_its_base_weights_have_changed(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lora = replace(LORA, policies=["planner", "worker"] if kind == "policies" else [])
    base = save_base(tmp_path / "base")

    def load(path: Path, folder: Path | None) -> tuple[Any, list[str]]:
        model = tiny_model()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            if kind == "critic":
                add_adapter(model, lora, base=str(path))
                add_to_base(model, lora, base=str(path), folder=folder)
            else:
                add_adapters(model, lora, base=str(path), folder=folder)
        return model, [record.getMessage() for record in caplog.records]

    model, _ = load(base, None)
    saved = tmp_path / "saved"
    if kind == "critic":
        adapter = {name: p for name, p in matrices(model).items() if adapter_of(name) == CRITIC}
        save_adapter(model, adapter, saved, CRITIC)
        head = next(value for name, value in model.state_dict().items() if "value_head" in name)
        save_file({"weight": head}, saved / critic_module.HEAD_FILE)
    else:
        Policy(model).save(saved)
    folders = [saved / name for name in lora.policies] or [saved]
    assert load(base, saved)[1] == []
    copy = save_base(tmp_path / "copy")
    assert load(copy, saved)[1] == []  # another name, the same weights
    save_base(base, seed=1)
    expected = [
        f"{place} was trained on other base weights than those of {base} now (which have "
        "changed): its products are wrong with them"
        for place in folders
    ]
    assert load(base, saved)[1] == expected
    for place in folders:  # as PEFT writes it
        save_file(load_file(place / ADAPTER.name), place / ADAPTER.name)
    assert load(base, saved)[1] == []
    messages = load(copy, saved)[1]
    assert len(messages) == len(folders)
    assert all(f"was trained on the base model {base}" in message for message in messages)


@pytest.mark.spec("lora.base-weights")
def test_resumed_run_names_base_weights_that_have_changed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = save_base(folder / "base")
    run = [*RUN, f"trainer.policy.model.path={base}"]
    train(settings(folder, "run", *run, "trainer.max_training_steps=1"))
    for changed in (False, True):
        save_base(base, seed=int(changed))
        caplog.clear()
        steps = f"trainer.max_training_steps={2 + changed}"
        with caplog.at_level(logging.WARNING):
            train(settings(folder, "run", *run, RESUME, steps))
        told = [m for m in caplog.messages if "was trained on other base weights" in m]
        assert len(told) == changed
