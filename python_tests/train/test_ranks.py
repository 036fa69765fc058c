"""Training with several ranks equals training with one; docs/spec.md section 7."""

import time
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from _moe import NUM_EXPERTS, NUM_LAYERS, TOP_K
from _ranked import Models, collectives_since, hold_gradients, make_models, watch_collectives
from _trees import agent_batch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef

from skyrl_fast.batch import StepBatch
from skyrl_fast.config import AlgorithmConfig
from skyrl_fast.rollout.engine.weights.transfer import distinct_tensors
from skyrl_fast.rollout.engine.weights.transports.file import send_by_file
from skyrl_fast.train.model import policy as policy_module
from skyrl_fast.train.model.loading import load_model
from skyrl_fast.train.model.policy import Policy, WithoutAdapter
from skyrl_fast.train.parallel.local_ranks import LocalRanks
from skyrl_fast.train.parallel.rank_processes import start_ranks
from skyrl_fast.train.parallel.ranks import SINGLE_RANK
from skyrl_fast.train.parallel.sharding import full_state_dict, local_tensor
from skyrl_fast.train.update import update_policy

CLOSE: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-6}  # float32 sums in another order
NUM_RANKS = 3  # neither a power of two nor a divisor of the widths


@dataclass(slots=True)
class Both:
    """The same models, with one rank and with several."""

    alone: Models
    shared: Models


GPUS = torch.cuda.device_count()
SEVERAL_GPUS = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two NVIDIA GPUs")]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=SEVERAL_GPUS)])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    cuda = request.param == "cuda"
    size = min(NUM_RANKS, GPUS) if cuda else NUM_RANKS
    folder = tmp_path_factory.mktemp("ranks")
    with start_ranks(size, make_models, cuda=cuda, starter=LocalRanks(folder)) as ranks:
        yield Both(make_models(SINGLE_RANK), make_models(ranks))


def weights(policy: Any) -> dict[str, torch.Tensor]:
    return {name: value.cpu().clone() for name, value in policy.named_weights()}


def assert_close(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        if name.endswith("k_proj.bias"):
            continue  # softmax ignores it: a noise gradient, which AdamW makes a step
        torch.testing.assert_close(one[name], two[name], msg=name, **CLOSE)


def assert_same_metrics(alone: dict[str, float], shared: dict[str, float]) -> None:
    split = {"policy/num_micro_batches", "policy/forward_tokens", "policy/token_saving"}
    assert alone.keys() == shared.keys()
    for key in alone.keys() - split:
        assert shared[key] == pytest.approx(alone[key], rel=1e-3, abs=1e-5), key


def routed(batch: StepBatch) -> StepBatch:
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(batch.num_tokens, NUM_LAYERS, NUM_EXPERTS, generator=generator)
    routes = scores.argsort(-1)[..., :TOP_K].to(torch.uint8)
    return batch.with_(expert_indices=routes, cu_experts=batch.cu_seqlens)


def update(models: Models, name: str, batch: StepBatch, **options: Any) -> dict[str, float]:
    policy, optimizer = models.policies[name], models.optimizers[name]
    defaults = {"algorithm": AlgorithmConfig(), "mini_batch_size": 2}
    return update_policy(policy, optimizer, batch, **{**defaults, **options})


CASES: dict[str, tuple[str, AlgorithmConfig]] = {
    "one head for in and out": ("tied", AlgorithmConfig()),
    "untied head": ("untied", AlgorithmConfig(policy_loss_type="dual_clip")),
    "layers within layers": ("nested", AlgorithmConfig()),
    "prefix trees": ("tree", AlgorithmConfig(use_entropy_loss=True)),
    "replayed routes": ("experts", AlgorithmConfig()),
    "replayed routes, activations made again": ("checkpointed", AlgorithmConfig()),
    "a vision-language model": ("vision", AlgorithmConfig()),
    "LoRA": ("adapter", AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1)),
    "ratio of a trajectory": ("untied", AlgorithmConfig(policy_loss_type="gspo")),
    "loss of the full mini-batch": ("untied", AlgorithmConfig(policy_loss_type="clip_cov")),
    "KL to a reference": ("untied", AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1)),
}


@pytest.mark.parametrize("case", CASES)
def test_update_equals_that_of_one_rank(both: Both, case: str) -> None:
    name, algorithm = CASES[case]
    batch = routed(agent_batch(7, num_groups=4)).with_(old_logprobs=None)
    metrics, seen = [], []
    for models in (both.alone, both.shared):
        torch.manual_seed(2)  # clip_cov draws tokens
        seen.append(torch.full_like(batch.rewards, float("nan")))
        of_base = WithoutAdapter(models.policies[name])
        reference = of_base if name == "adapter" else models.reference
        options = {"algorithm": algorithm, "reference": reference}
        update(models, name, batch, mini_batch_size=2, update_epochs=2, **options)
        found = update(models, name, batch, mini_batch_size=4, seen_logprobs=seen[-1], **options)
        metrics.append(found)
    assert_close(*(weights(models.policies[name]) for models in (both.alone, both.shared)))
    torch.testing.assert_close(*seen, equal_nan=True, **CLOSE)
    assert_same_metrics(*metrics)


@pytest.mark.spec("update.ranks-reduce-once")
@pytest.mark.parametrize("holds", [True, False])
def test_gradients_are_reduced_once_where_a_rank_holds_them(both: Both, holds: bool) -> None:
    batch = agent_batch(7, num_groups=4)
    policy, critic = both.shared.policies["tied"], both.shared.critic
    with_returns = batch.with_(values=critic.batch_values(batch), returns=-batch.rewards)
    traffic = policy.ranks.traffic
    hold_gradients(policy, holds)
    try:
        traffic.take()
        update(both.alone, "tied", batch, mini_batch_size=4)
        found = update(both.shared, "tied", batch, mini_batch_size=4)
        of_policy = traffic.take()["traffic/gradients_messages"]
        one, other = both.alone.critic.update(with_returns), critic.update(with_returns)
        of_critic = traffic.take()["traffic/gradients_messages"]
    finally:
        hold_gradients(policy, True)
    assert_close(*(weights(models.policies["tied"]) for models in (both.alone, both.shared)))
    assert other == pytest.approx(one, rel=1e-3)
    passes = -(-found["policy/num_micro_batches"] // policy.ranks.size)
    units = len(policy.model.base_model.layers) + 1
    assert passes >= 2
    assert of_policy == units * (1 if holds else passes)
    steps = int(other["critic/optimizer_steps"])
    assert of_critic == units * steps if holds else of_critic > units * steps


@pytest.mark.spec("update.ranks-equal")
def test_each_rank_holds_its_shard_of_weights_and_moments(both: Both) -> None:
    size = both.shared.ranks.size
    update(both.alone, "untied", agent_batch(6, num_groups=2))
    update(both.shared, "untied", agent_batch(6, num_groups=2))
    for parameter in both.shared.policies["untied"].model.parameters():
        moments = both.shared.optimizers["untied"].adamw.state[parameter]
        for tensor in (parameter, moments["exp_avg"], moments["exp_avg_sq"]):
            rows = -(-tensor.shape[0] // size)
            assert tensor.to_local().shape == (rows, *tensor.shape[1:])


def test_logprobs_equal_those_of_one_rank(both: Both) -> None:
    batch = routed(agent_batch(8))
    for name in both.alone.policies:
        one, other = (models.policies[name] for models in (both.alone, both.shared))
        torch.testing.assert_close(one.batch_logprobs(batch), other.batch_logprobs(batch), **CLOSE)
        tokens = [4, 9, 5, 5, 12]
        [(wanted, logit_std)] = one.sequence_logprobs([tokens])
        [(values, other_std)] = other.sequence_logprobs([tokens])
        assert (values, other_std) == (
            pytest.approx(wanted, rel=1e-4),
            pytest.approx(logit_std, rel=1e-4),
        )


@pytest.mark.parametrize("name", ["critic", "adapter_critic"])
def test_critic_learns_as_with_one_rank(both: Both, name: str) -> None:
    batch = agent_batch(9, num_groups=4)
    noise = torch.randn(2, len(batch.rewards), generator=torch.Generator().manual_seed(4))
    one, other = getattr(both.alone, name), getattr(both.shared, name)
    torch.testing.assert_close(one.batch_values(batch), other.batch_values(batch), **CLOSE)
    batch = batch.with_(values=one.batch_values(batch), returns=noise[0])
    assert other.update(batch) == pytest.approx(one.update(batch), rel=1e-3)
    torch.testing.assert_close(one.batch_values(batch), other.batch_values(batch), **CLOSE)


@pytest.mark.spec("update.ranks-equal", "lora.critic")
def test_ranks_train_policy_and_critic_on_one_base(both: Both, tmp_path: Path) -> None:
    batch = agent_batch(9, num_groups=4)
    values = [models.adapter_critic.batch_values(batch) for models in (both.alone, both.shared)]
    for models, folder in ((both.alone, "alone"), (both.shared, "shared")):
        update(models, "critic on the base", batch)
        models.adapter_critic.save(tmp_path / folder)
    both.shared.ranks.files.start(tmp_path / "shared")
    both.shared.ranks.files.wait()
    assert_close(*(weights(m.policies["critic on the base"]) for m in (both.alone, both.shared)))
    for models, before in zip((both.alone, both.shared), values, strict=True):
        assert torch.equal(models.adapter_critic.batch_values(batch), before)
    names = "adapter_model.safetensors", "value_head.safetensors"
    for name in names:
        assert_close(*(load_file(tmp_path / folder / name) for folder in ("alone", "shared")))


@pytest.mark.spec("update.ranks-equal")
def test_ranks_share_a_frozen_base_in_bfloat16(both: Both) -> None:
    batch = agent_batch(7, num_groups=4)
    for models in (both.alone, both.shared):
        update(models, "frozen bfloat16", batch)
    alone, shared = (models.policies["frozen bfloat16"] for models in (both.alone, both.shared))
    assert {p.dtype for p in shared.model.parameters()} == {torch.bfloat16, torch.float32}
    one, other = (dict(policy.named_weights(adapter=True)) for policy in (alone, shared))
    assert one.keys() == other.keys()
    for name, value in one.items():
        # AdamW's first step is the learning rate, 1e-2, whose sign bfloat16 noise may change where
        # the gradient is small
        assert (other[name] - value).abs().mean() < 2e-3, name


def test_the_shards_of_a_frozen_base_leave_and_come_back(both: Both) -> None:
    """Also those that FSDP2 pads: the widths are no multiples of the number of ranks."""
    policy, batch = both.shared.policies["adapter"], agent_batch(8, num_groups=4)
    expected, full = policy.batch_logprobs(batch), weights(policy)
    policy.offload_base()
    shards = {n: p.to_local().untyped_storage() for n, p in policy.model.named_parameters()}
    assert {n for n, s in shards.items() if s.nbytes()} == set(dict(policy.trained_parameters()))
    policy.load_base()
    assert torch.equal(policy.batch_logprobs(batch), expected)
    assert all(torch.equal(value, full[name]) for name, value in weights(policy).items())
    for models in (both.alone, both.shared):
        update(models, "adapter", batch)
    assert_close(*(weights(models.policies["adapter"]) for models in (both.alone, both.shared)))


def save(policy: Policy, folder: Path) -> None:
    folder.mkdir()
    policy.save(folder)
    policy.ranks.files.start(folder)
    policy.ranks.files.wait()


@pytest.mark.spec("memory.offload-weights")
def test_the_shards_of_all_weights_leave_and_come_back(both: Both, tmp_path: Path) -> None:
    """They are gathered in main memory meanwhile, also those of fewer rows than others."""
    policy, batch = both.shared.policies["tied"], agent_batch(9, num_groups=4)
    expected, full = policy.batch_logprobs(batch), weights(policy)
    policy.move_to_host()
    shards = {n: local_tensor(p).untyped_storage() for n, p in policy.model.named_parameters()}
    assert not any(storage.nbytes() for storage in shards.values())
    found = weights(policy)
    assert found.keys() == full.keys()
    assert all(torch.equal(value, full[name]) for name, value in found.items())
    # Each rank gathers all layers for its part of the file.
    save(policy, tmp_path / "there")
    policy.move_to_device()
    save(policy, tmp_path / "back")
    for file in (tmp_path / "back").iterdir():
        assert file.read_bytes() == (tmp_path / "there" / file.name).read_bytes(), file.name
    assert torch.equal(policy.batch_logprobs(batch), expected)
    for models in (both.alone, both.shared):
        update(models, "tied", batch)
    assert_close(*(weights(models.policies["tied"]) for models in (both.alone, both.shared)))


@pytest.mark.spec("update.ranks-checkpoint")
@pytest.mark.parametrize("name", ["tied", "experts", "vision"])
def test_checkpoints_do_not_depend_on_the_number_of_ranks(
    both: Both, tmp_path: Path, name: str
) -> None:
    batch = routed(agent_batch(10, num_groups=2))
    folders = [tmp_path / "alone", tmp_path / "shared"]
    sides = list(zip((both.alone, both.shared), folders, strict=True))
    for models, folder in sides:
        update(models, name, batch)
        folder.mkdir()
        models.policies[name].save(folder)
        models.optimizers[name].save(folder)
    both.shared.ranks.files.start(folders[1])
    both.shared.ranks.files.wait()
    loaded = load_model(str(folders[1]), device=torch.device("cpu"))
    assert loaded.config.architectures == both.alone.policies[name].model.config.architectures
    assert_close(weights(both.shared.policies[name]), weights(Policy(loaded)))
    for (models, _), folder in zip(sides, reversed(folders), strict=True):
        models.optimizers[name].load(folder)
        update(models, name, batch)
    assert_close(*(weights(models.policies[name]) for models, _ in sides))


def test_engine_receives_the_weights_of_one_rank(
    both: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.core_model_loading import Chunk, WeightConverter

    update(both.alone, "untied", agent_batch(11, num_groups=2))
    update(both.shared, "untied", agent_batch(11, num_groups=2))
    parts = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]  # one weight in the checkpoint
    joined = WeightConverter(["mlp.gate_up_proj.weight"], parts, operations=[Chunk(dim=0)])
    given = []
    for models in (both.alone, both.shared):
        policy = models.policies["untied"]
        monkeypatch.setattr(policy.model, "_weight_conversions", [joined], raising=False)
        with send_by_file(policy.named_weights(), folder=str(tmp_path)) as call:
            given.append(load_file(call.arguments[0]))
    assert_close(*given)
    assert any(name.endswith("gate_up_proj.weight") for name in given[0])


def test_no_weight_is_gathered_by_gloos_coalesced_gather(both: Both, tmp_path: Path) -> None:
    """Which crashes now and then; see `sharding._gather_rows`. A functional gather is one."""
    policy = both.shared.policies["tied"]
    optimizer = both.shared.optimizers["tied"]
    watch_collectives(policy)
    try:
        update(both.shared, "tied", agent_batch(12, num_groups=2))
        weights(policy)
        save(policy, tmp_path / "saved")
        optimizer.save(tmp_path / "saved")
    finally:
        found = collectives_since(policy)
    assert len(found) == both.shared.ranks.size
    for names in found:
        assert "c10d::_allgather_base_" in names  # of a layer, and of a weight
        assert "_c10d_functional::all_reduce" in names  # of the gradients' norm
        assert not any("coalesced" in name for name in names)


def test_weights_are_gathered_by_layer_next_to_other_calls(both: Both) -> None:
    """As in a weight sync: a thread gathers while an engine that has all weights is verified."""
    policy = both.shared.policies["untied"]
    wanted = weights(policy)
    with ThreadPoolExecutor(1) as threads:
        gathered = threads.submit(lambda: [weights(policy) for _ in range(5)])
        logprobs = [policy.sequence_logprobs([[1, 2, 3]]) for _ in range(5)]
        found = gathered.result(120)
    assert logprobs == [logprobs[0]] * 5
    for one in found:
        assert one.keys() == wanted.keys()
        assert all(torch.equal(one[name], wanted[name]) for name in wanted)


def test_an_adapter_is_gathered_next_to_a_forward_pass(both: Both) -> None:
    """Of which each layer is sharded again after it, and not while it computes."""
    policy = both.shared.policies["adapter"]
    expected = policy.sequence_logprobs([[1, 2, 3]])
    gathering: list[Future[dict[str, torch.Tensor]]] = []
    with ThreadPoolExecutor(1) as threads:

        def gather(*_: Any) -> None:
            gathering.append(threads.submit(lambda: dict(policy.named_weights(adapter=True))))
            futures.wait(gathering, 0.5)  # it waits for this pass, unless it needs no other rank

        inside = policy.backbone.layers[1].mlp.register_forward_pre_hook(gather)
        found = policy.sequence_logprobs([[1, 2, 3]])
        inside.remove()
        adapter = gathering[0].result(60)
    assert found == expected
    assert adapter.keys() == dict(policy.named_weights(adapter=True)).keys()


def test_one_layer_of_the_weights_is_held_at_a_time(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = both.shared.policies["untied"]
    held: list[Any] = []
    alive: list[int] = []

    def counted(owner: Any, dtype: Any, names: list[str]) -> dict[str, torch.Tensor]:
        for _ in range(500):  # gloo's threads may hold what they sent for a moment longer
            number = sum(not one.expired() for one in held)
            if number <= 1:
                break
            time.sleep(0.01)
        alive.append(number)
        found = full_state_dict(owner, dtype, names)
        held.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in found.values())
        return found

    monkeypatch.setattr(policy_module, "full_state_dict", counted)
    names = []
    for name, tensor in distinct_tensors(policy.named_weights()):
        names.append(name)
        del tensor
    layers = len(policy.model.base_model.layers)
    assert len(alive) == layers + 3  # embedding, last norm, head
    assert max(alive) <= 1  # the caller's last one
    assert len(names) == len(held)


def test_consumer_of_some_weights_does_not_desynchronize_ranks(both: Both) -> None:
    policy = both.shared.policies["untied"]
    first = next(iter(policy.named_weights()))
    assert weights(policy).keys() > {first[0]}
    critic_values = both.shared.critic.batch_values(agent_batch(9, num_groups=1))
    assert bool(critic_values.isfinite().all())
