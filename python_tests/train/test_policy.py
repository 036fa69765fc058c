"""The policy: logprobs equal Hugging Face's, gradients do not depend on the split."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _fakes import FakeRollouts, make_prompts, tiny_model
from _rows import full_logprobs, mixed_batch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_fast.batch import StepBatch, batch_from_trajectories
from skyrl_fast.config import AlgorithmConfig, Config, OptimizerConfig
from skyrl_fast.train.algorithm.advantages import compute_advantages
from skyrl_fast.train.model import lm_head
from skyrl_fast.train.model.critic import Critic, ValueModel
from skyrl_fast.train.model.loading import (
    checkpoint_gradients,
    load_model,
    load_tokenizer,
    remove_dropout,
)
from skyrl_fast.train.model.micro_batch import plan_micro_batches
from skyrl_fast.train.model.optimizer import Optimizer, learning_rate
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.update import accumulate_gradient, contributing_rows, update_policy


def rollout_batch(model: Any, num_prompts: int = 4, samples: int = 4) -> StepBatch:
    config = Config()
    config.generator.n_samples_per_prompt = samples
    rollouts = FakeRollouts(config, model)
    trajectories = asyncio.run(rollouts.generate(make_prompts(num_prompts), step=0, phase="train"))
    batch = batch_from_trajectories(trajectories)
    return batch.with_(advantages=compute_advantages(batch).advantages)


@pytest.mark.parametrize("budget", [1, 20, 1000])
@pytest.mark.parametrize("tied", [False, True])
def test_logprobs_equal_those_of_the_full_logits(budget: int, tied: bool) -> None:
    model = tiny_model(tied=tied)
    batch = mixed_batch()
    policy = Policy(model, max_tokens_per_microbatch=budget)
    with torch.no_grad():
        expected = full_logprobs(model, batch) * batch.loss_mask
    # float32 noise: another order of summation in the attention and in the head
    torch.testing.assert_close(policy.batch_logprobs(batch), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("head", "operands", "tolerance"),
    [(None, torch.bfloat16, 2**-6), (torch.float32, torch.float32, 1e-5)],
)
def test_head_dtype_follows_the_forward_pass_or_the_setting(
    head: torch.dtype | None,
    operands: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Norms return float32 under autocast; the head must not follow them."""
    seen, chosen = [], lm_head.linear_logprob

    def spy(hidden: torch.Tensor, weight: torch.Tensor, *rest: Any, **options: Any) -> Any:
        seen.append((hidden.detach(), weight, rest[0], chosen(hidden, weight, *rest, **options)))
        return seen[-1][-1]

    monkeypatch.setattr(lm_head, "linear_logprob", spy)
    model = tiny_model()
    policy = Policy(model, dtype=torch.bfloat16, head_dtype=head)
    batch = rollout_batch(tiny_model())
    values = policy.batch_logprobs(batch)
    for hidden, weight, targets, got in seen:
        assert hidden.dtype == weight.dtype == operands and got.dtype == torch.float32
        exact = (hidden.double() @ weight.double().T).log_softmax(-1)
        wanted = exact.gather(-1, targets[..., None]).squeeze(-1)
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=tolerance)
    assert values[batch.loss_mask != 0].isfinite().all()
    for micro in plan_micro_batches(batch, 16384):
        policy.logprobs(micro)[0].sum().backward()
    assert model.get_output_embeddings().weight.grad.dtype == torch.float32


@pytest.mark.spec("sync.probe-limits")
def test_head_of_the_probe_computes_in_float32() -> None:
    model = tiny_model()
    policy = Policy(model, dtype=torch.bfloat16)
    ids = torch.tensor([[4, 5, 6, 9]])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
    logits = hidden.double() @ model.get_output_embeddings().weight.double().T
    [(values, logit_std)] = policy.sequence_logprobs(ids.tolist())
    wanted = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    assert values == pytest.approx(wanted.tolist(), abs=1e-6)  # bfloat16: 1e-3
    assert logit_std == pytest.approx(logits.std(-1).mean().item(), rel=1e-5)


def test_steps_that_extend_each_other_share_a_sequence() -> None:
    batch = rollout_batch(tiny_model())
    plan = plan_micro_batches(batch, 10_000)
    assert sum(micro.input_ids.shape[0] for micro in plan) == batch.num_trajectories
    assert sum(len(micro.target_ids) for micro in plan) == int(batch.loss_mask.sum())


def test_a_rewritten_context_keeps_a_separate_sequence() -> None:
    batch = rollout_batch(tiny_model())
    tokens = batch.tokens.clone()
    tokens[int(batch.cu_seqlens[1])] += 1  # the second step's context starts differently
    plan = plan_micro_batches(batch.with_(tokens=tokens), 10_000)
    assert sum(micro.input_ids.shape[0] for micro in plan) == batch.num_trajectories + 1


@pytest.mark.spec("loss.split-invariance")
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "prompt_mean"])
def test_gradient_does_not_depend_on_the_split(reduction: str) -> None:
    algorithm = AlgorithmConfig(loss_reduction=reduction)
    batch = mixed_batch()
    batch = batch.with_(old_logprobs=batch.rollout_logprobs)
    gradients = []
    for budget in (10_000, 20, 1):
        model = tiny_model(dtype=torch.float64)
        policy = Policy(model, max_tokens_per_microbatch=budget)
        accumulate_gradient(policy, batch, algorithm=algorithm)
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    # the loss is float32 per token; the weights of the tokens are the same in every split
    for other in gradients[1:]:
        for one, two in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)


@pytest.mark.spec("metrics.update")
def test_metrics_do_not_depend_on_the_split() -> None:
    algorithm = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.5)
    batch = mixed_batch()
    old = batch.rollout_logprobs
    batch = batch.with_(old_logprobs=old, ref_logprobs=old - 0.3)
    found = [
        accumulate_gradient(
            Policy(tiny_model(), max_tokens_per_microbatch=budget), batch, algorithm=algorithm
        )
        for budget in (10_000, 20, 1)
    ]
    expected = found[0]
    both = expected["policy/policy_loss"] + 0.5 * expected["policy/kl_loss"]
    assert both == pytest.approx(expected["policy/loss"], rel=1e-5)
    split = {"policy/num_micro_batches", "policy/forward_tokens", "policy/token_saving"}
    for other in found[1:]:
        assert other.keys() == expected.keys()
        for name in expected.keys() - split:
            assert other[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def tiny_rope(kind: str, limit: int = 8) -> Any:
    """Return a model whose rotary embedding changes beyond `limit` tokens."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0,
        "bos_token_id": None, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "longrope":
        factors = {"short_factor": [1.0, 2.0, 4.0, 8.0], "long_factor": [8.0, 4.0, 2.0, 1.0]}
        config = transformers.Phi3Config(
            **sizes, max_position_embeddings=64, original_max_position_embeddings=limit,
            rope_scaling={"rope_type": "longrope", **factors},
        )  # fmt: skip
        model: Any = transformers.Phi3ForCausalLM(config)
    else:
        config = transformers.LlamaConfig(
            **sizes, max_position_embeddings=limit, rope_scaling={"rope_type": kind, "factor": 4.0}
        )
        model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():  # large, so that the frequencies matter
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


@pytest.mark.spec("loss.rope-limits")
@pytest.mark.parametrize("budget", [1, 20, 1000])
def test_rows_on_both_sides_of_a_longrope_limit_do_not_share_a_pass(budget: int) -> None:
    # In the second batch, steps extend each other.
    for batch, limit in ((mixed_batch(), 8), (rollout_batch(tiny_model()), 5)):
        lengths = batch.cu_seqlens.diff()
        assert (lengths <= limit).any() and (lengths > limit).any()
        model = tiny_rope("longrope", limit)
        policy = Policy(model, max_tokens_per_microbatch=budget)
        with torch.no_grad():
            expected = full_logprobs(model, batch) * batch.loss_mask
        torch.testing.assert_close(policy.batch_logprobs(batch), expected, atol=2e-5, rtol=0)


def test_rows_beyond_the_limit_of_a_dynamic_rotary_embedding_are_refused() -> None:
    policy = Policy(tiny_rope("dynamic"))
    batch = mixed_batch()
    with pytest.raises(ValueError, match=r"row 1 has 10 tokens.*\(dynamic\).*_embeddings=8"):
        policy.batch_logprobs(batch)
    with pytest.raises(ValueError, match="row 1 has 10 tokens"):
        accumulate_gradient(policy, batch, algorithm=AlgorithmConfig())
    short = batch.rows([0, 2, 4])
    assert int(short.cu_seqlens.diff().max()) <= 8
    with torch.no_grad():
        expected = full_logprobs(policy.model, short) * short.loss_mask
    torch.testing.assert_close(policy.batch_logprobs(short), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("loss", "reason"), [("kl_cov", "all rows of a mini-batch"), ("gspo", "trajectory 0 has rows")]
)
def test_losses_that_need_rows_of_both_sides_in_one_pass_are_refused(
    loss: str, reason: str
) -> None:
    batch = rollout_batch(tiny_model())
    tokens = batch.tokens.clone()  # rows that differ in their first token share no sequence
    tokens[batch.cu_seqlens[:-1].long()] = torch.arange(batch.num_rows).int() % 16
    ones = torch.ones_like(batch.advantages)  # so that every row has a gradient
    batch = batch.with_(tokens=tokens, old_logprobs=batch.rollout_logprobs, advantages=ones)
    with pytest.raises(ValueError, match=f"{reason}.*depends on the longest row"):
        accumulate_gradient(
            Policy(tiny_rope("longrope", 5)),
            batch,
            algorithm=AlgorithmConfig(policy_loss_type=loss),
        )


def test_masked_tokens_have_no_gradient() -> None:
    algorithm = AlgorithmConfig()
    batch = mixed_batch()
    gradients = []
    for change in (0.0, 1e6):
        model = tiny_model()
        values = torch.where(batch.loss_mask != 0, batch.advantages, torch.tensor(change))
        accumulate_gradient(Policy(model), batch.with_(advantages=values), algorithm=algorithm)
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, two in zip(*gradients, strict=True):
        assert torch.equal(one, two)


def test_rows_without_advantage_are_skipped_without_effect() -> None:
    algorithm = AlgorithmConfig()
    batch = mixed_batch()
    values = batch.advantages.clone()
    values[: int(batch.cu_responses[4])] = 0.0
    batch = batch.with_(advantages=values)
    assert contributing_rows(batch, algorithm).tolist()[:4] == [False] * 4
    model, reference = tiny_model(), tiny_model()
    skipped = accumulate_gradient(Policy(model), batch, algorithm=algorithm)
    with_kl = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.0)
    assert contributing_rows(batch, with_kl).all()
    accumulate_gradient(
        Policy(reference), batch.with_(ref_logprobs=torch.zeros_like(values)), algorithm=with_kl
    )
    assert skipped["policy/rows_without_gradient"] >= 4
    for one, two in zip(model.parameters(), reference.parameters(), strict=True):
        # other sequences in the batch: another order of summation
        torch.testing.assert_close(one.grad, two.grad, atol=1e-6, rtol=1e-4)


def test_all_masked_batch_gives_no_gradient_and_no_nan() -> None:
    batch = mixed_batch()
    batch = batch.with_(loss_mask=torch.zeros_like(batch.loss_mask))
    model = tiny_model()
    before = [parameter.clone() for parameter in model.parameters()]
    policy = Policy(model)
    optimizer = Optimizer(policy, OptimizerConfig(lr=1.0), total_steps=1)
    metrics = update_policy(
        policy, optimizer, batch, algorithm=AlgorithmConfig(), mini_batch_size=2
    )
    assert metrics["policy/loss"] == 0.0
    for one, two in zip(before, model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.spec("update.mini-batch-size")
@pytest.mark.parametrize(("mini", "epochs", "steps"), [(4, 1, 1), (2, 1, 2), (1, 1, 4), (2, 3, 6)])
def test_number_of_optimizer_steps(mini: int, epochs: int, steps: int) -> None:
    model = tiny_model()
    policy = Policy(model)
    optimizer = Optimizer(policy, OptimizerConfig(lr=1e-3), total_steps=10)
    metrics = update_policy(
        policy,
        optimizer,
        rollout_batch(model),
        algorithm=AlgorithmConfig(),
        mini_batch_size=mini,
        update_epochs=epochs,
    )
    assert optimizer.step_count == steps
    assert metrics["policy/optimizer_steps"] == steps


@pytest.mark.spec("update.old-logprobs")
def test_the_first_mini_batch_needs_no_pass_for_old_logprobs() -> None:
    computed: list[int] = []

    class Counted(Policy):
        def batch_logprobs(self, batch: StepBatch) -> torch.Tensor:
            computed.append(batch.num_groups)
            return super().batch_logprobs(batch)

    batch = rollout_batch(tiny_model())
    batch = batch.with_(advantages=torch.linspace(-1.0, 1.0, len(batch.rewards)))
    found = []
    for given in (False, True):
        policy = Counted(tiny_model())
        old = Policy(tiny_model()).batch_logprobs(batch)
        optimizer = Optimizer(policy, OptimizerConfig(lr=1e-2), total_steps=4)
        seen = torch.full_like(batch.rewards, float("nan"))
        metrics = update_policy(
            policy,
            optimizer,
            batch.with_(old_logprobs=old) if given else batch,
            algorithm=AlgorithmConfig(),
            mini_batch_size=1,
            seen_logprobs=seen,
        )
        found.append([metrics[f"policy/{name}"] for name in ("loss", "ratio_max", "approx_kl")])
        trained = batch.loss_mask != 0
        torch.testing.assert_close(seen[trained], old[trained], atol=1e-5, rtol=0)
    assert computed == [batch.num_groups - 1]  # of 4 mini-batches all but the first
    assert found[0] == pytest.approx(found[1], abs=1e-6)  # rounding of other passes
    computed.clear()
    for options in ({"update_epochs": 2}, {"mini_batch_size": batch.num_groups}):
        policy = Counted(tiny_model())
        optimizer = Optimizer(policy, OptimizerConfig(lr=1e-2), total_steps=8)
        update_policy(
            policy,
            optimizer,
            batch,
            **{"algorithm": AlgorithmConfig(), "mini_batch_size": 1, **options},
        )
    assert computed == [batch.num_groups]  # all with two epochs, none with one mini-batch


def test_kl_to_the_initial_policy_starts_at_zero_and_pulls_back() -> None:
    algorithm = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=1.0)
    model, reference = tiny_model(0), Policy(tiny_model(0))
    batch = rollout_batch(model).with_()
    batch = batch.with_(advantages=torch.zeros_like(batch.advantages))
    policy = Policy(model)
    optimizer = Optimizer(policy, OptimizerConfig(lr=0.0, max_grad_norm=0.0), total_steps=1)
    same = update_policy(
        policy, optimizer, batch, algorithm=algorithm, mini_batch_size=4, reference=reference
    )
    other = update_policy(
        policy,
        optimizer,
        batch,
        algorithm=algorithm,
        mini_batch_size=4,
        reference=Policy(tiny_model(1)),
    )
    assert same["policy/loss"] == pytest.approx(0.0, abs=1e-6)
    assert other["policy/loss"] > 0.01
    assert other["policy/grad_norm"] > 10 * same["policy/grad_norm"]


def test_nonfinite_gradient_skips_the_update() -> None:
    model = tiny_model()
    policy = Policy(model)
    optimizer = Optimizer(policy, OptimizerConfig(lr=1.0), total_steps=1)
    before = [parameter.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    assert optimizer.step()["policy/nonfinite_steps_skipped"] == 1.0
    for one, two in zip(before, model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_gradient_norm_is_clipped() -> None:
    model = tiny_model()
    optimizer = Optimizer(Policy(model), OptimizerConfig(max_grad_norm=0.5), total_steps=1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert optimizer.step()["policy/grad_norm"] == pytest.approx(count**0.5, rel=1e-4)


def test_schedules() -> None:
    linear = OptimizerConfig(lr=1.0, num_warmup_steps=2, scheduler="linear")
    assert [learning_rate(i, linear, total_steps=6) for i in range(7)] == [
        0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0,
    ]  # fmt: skip
    cosine = OptimizerConfig(lr=1.0, scheduler="cosine")
    assert learning_rate(5, cosine, total_steps=10) == pytest.approx(0.5)


class _Casts(TorchDispatchMode):
    """Records the tensors cast to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16:
            self._made.append(StorageWeakRef(result.untyped_storage()))
        return result

    def alive(self) -> int:
        return sum(not made.expired() for made in self._made)


def test_activation_checkpointing_keeps_no_cast_weights() -> None:
    model = tiny_model()
    checkpoint_gradients(model)
    policy = Policy(model.train(), dtype=torch.bfloat16)
    (micro,) = plan_micro_batches(mixed_batch(), 1 << 20)
    left = []
    with _Casts() as casts:
        for layer in model.base_model.layers:
            layer.register_forward_hook(lambda *_: left.append(casts.alive()))
        policy.logprobs(micro)
    assert len(left) == 2 and left[0] == left[1]


def test_what_is_not_trained_is_neither_optimized_nor_sent() -> None:
    model = tiny_model()
    policy = Policy(model)
    every = {name for name, _ in policy.named_weights()}
    frozen = [name for name, _ in model.named_parameters() if ".layers.0." in name]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    optimizer = Optimizer(policy, OptimizerConfig(lr=1.0), total_steps=1)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    for _, parameter in policy.trained_parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    changed = {n for n, value in model.named_parameters() if not torch.equal(value, before[n])}
    assert frozen and changed == before.keys() - set(frozen)
    assert {name for name, _ in policy.named_weights()} == every - set(frozen)


def test_optimizer_state_of_another_model_is_refused(tmp_path: Path) -> None:
    optimizer = Optimizer(Policy(tiny_model()), OptimizerConfig(), total_steps=1)
    for _, parameter in optimizer.named_parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.save(tmp_path)
    model = tiny_model()
    model.lm_head = torch.nn.Linear(16, 32, bias=False)
    with pytest.raises(ValueError, match="another shape"):
        Optimizer(Policy(model), OptimizerConfig(), total_steps=1).load(tmp_path)


RANDOM = {
    "mixtral": {"router_jitter_noise": 0.01, "attention_dropout": 0.3, "num_local_experts": 4},
    "phimoe": {"router_jitter_noise": 0.01, "input_jitter_noise": 0.01, "num_local_experts": 4},
    "starcoder2": {"residual_dropout": 0.3, "embedding_dropout": 0.3},
    "opt": {"dropout": 0.3, "layerdrop": 0.3, "ffn_dim": 16, "word_embed_proj_dim": 16},
    "gpt2": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "n_layer": 2, "n_embd": 16, "n_head": 2},
}


@pytest.mark.spec("loss.training-mode")
@pytest.mark.parametrize("kind", RANDOM)
def test_checkpointed_models_compute_as_the_sampler_does(kind: str) -> None:
    sizes = {
        "vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(sizes | RANDOM[kind]))
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        wanted = model.eval()(input_ids=ids).logits
        random = model.train()(input_ids=ids).logits
        remove_dropout(model)
        for _ in range(3):
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, wanted)
    assert not torch.equal(random, wanted)
    state = torch.get_rng_state()
    Policy(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert getattr(model.config, next(iter(RANDOM[kind]))) > 0  # what is saved is unchanged


def test_dropout_that_a_model_reads_from_its_configuration_is_refused() -> None:
    sizes = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("falcon", **sizes, hidden_dropout=0.3)
    model = AutoModelForCausalLM.from_config(config).train()
    remove_dropout(model)
    with pytest.raises(ValueError, match=r"random in training mode.*: set hidden_dropout to 0 in"):
        Policy(model)
    Policy(model.eval())


def test_a_model_that_is_random_in_training_mode_is_refused() -> None:
    model = tiny_model().train()
    model.model.embed_tokens.register_forward_hook(
        lambda module, arguments, output: output * (1 + 1e-4 * torch.rand(1))
    )
    with pytest.raises(ValueError, match="is random in training mode, which gradient checkpoint"):
        Policy(model)
    with pytest.raises(ValueError, match="is random in training mode"):
        Critic(ValueModel(model.base_model), OptimizerConfig(), total_steps=1, mini_batch_size=1)


@pytest.mark.spec("tree.sequence-passes")
@pytest.mark.parametrize(
    ("widths", "rows", "budget", "wanted"),
    [
        ([90, 80, 10], 1, 640, [2, 1]),  # a pass costs 20 tokens
        ([90, 80, 70], 1, 640, [3]),
        ([90, 70, 70], 1, 200, [1, 2]),
        ([90, 10], 1, 1 << 20, [2]),
        ([900], 3, 640, [3]),  # cannot be divided
    ],
)
def test_sequences_are_divided_where_a_pass_costs_less_than_padding(
    widths: list[int], rows: int, budget: int, wanted: list[int]
) -> None:
    lengths = [width for width in widths for _ in range(rows)]
    batch = batch_of_lengths(lengths)
    units = torch.arange(len(lengths), dtype=torch.int32) // rows
    plan = plan_micro_batches(batch.with_(trajectory_ids=units), budget, keep_trajectories=True)
    assert [micro.input_ids.shape[0] for micro in plan] == wanted


def batch_of_lengths(lengths: list[int]) -> StepBatch:
    """Return unrelated rows of these lengths; the last token of each is trained."""
    output = {
        "prompt_token_ids": [[row] * (n - 1) for row, n in enumerate(lengths)],
        "response_ids": [[6]] * len(lengths),
        "loss_masks": [[1]] * len(lengths),
        "rewards": [1.0] * len(lengths),
        "trajectory_ids": [("a", i) for i in range(len(lengths))],
        "is_last_step": [True] * len(lengths),
    }
    return StepBatch.from_generator_output(output, step_wise=True)


@pytest.mark.spec("tree.sequence-passes")
def test_a_long_row_does_not_pad_the_short_ones() -> None:
    batch = batch_of_lengths([512, *[64] * 31])
    sizes = [micro.input_ids.numel() for micro in plan_micro_batches(batch, 1 << 14)]
    assert sizes == [512, 31 * 64]  # one pass would have 32 * 512


def test_trained_row_without_a_prompt_is_refused() -> None:
    output = {
        "prompt_token_ids": [[]],
        "response_ids": [[5]],
        "loss_masks": [[1]],
        "rewards": [1.0],
        "trajectory_ids": [("a", 0)],
        "is_last_step": [True],
    }
    batch = StepBatch.from_generator_output(output, step_wise=True)
    with pytest.raises(ValueError, match="row 0 is trained but has an empty prompt"):
        plan_micro_batches(batch, 100)


def test_resume_with_a_parameter_without_gradients(tmp_path: Path) -> None:
    def made() -> tuple[Policy, Optimizer]:
        model = tiny_model()
        model.unused = torch.nn.Parameter(torch.ones(3))  # like an expert that received no tokens
        policy = Policy(model)
        return policy, Optimizer(policy, OptimizerConfig(lr=1e-2), total_steps=4)

    def step(policy: Policy, optimizer: Optimizer) -> None:
        policy.model(torch.tensor([[1, 2, 3]])).logits.square().sum().backward()
        optimizer.step()

    policy, optimizer = made()
    step(policy, optimizer)
    optimizer.save(tmp_path)
    again, resumed = made()
    again.model.load_state_dict(policy.model.state_dict())
    resumed.load(tmp_path)
    step(policy, optimizer)
    step(again, resumed)
    for one, two in zip(policy.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.spec("run.no-model-code")
@pytest.mark.parametrize("load", ["model", "backbone", "tokenizer"])
def test_code_in_a_model_folder_is_never_run(
    load: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = {"AutoConfig": "code.C", "AutoModel": "code.M", "AutoModelForCausalLM": "code.M"}
    config = {"model_type": "unknown", "auto_map": {**classes, "AutoTokenizer": ["code.T", None]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")
    loads = {
        "model": partial(load_model, str(tmp_path), device=torch.device("cpu")),
        "backbone": partial(load_model, str(tmp_path), device=torch.device("cpu"), with_head=False),
        "tokenizer": partial(load_tokenizer, str(tmp_path)),
    }
    with pytest.raises(ValueError, match="contains custom code"):
        loads[load]()
    assert not (tmp_path / "ran").exists()
