"""Ranks that share the tokens of a pass train as one rank does; docs/spec.md section 7."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _sequence_ranked import SHARED, make_models
from _trees import agent_batch
from safetensors.torch import load_file
from test_ranks import (
    CLOSE,
    SEVERAL_GPUS,
    Both,
    assert_close,
    assert_same_metrics,
    routed,
    update,
    weights,
)

from skyrl_fast.config import AlgorithmConfig
from skyrl_fast.config.loading import ConfigError, load_config
from skyrl_fast.train.model.micro_batch import plan_micro_batches
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.model.tree_forward import padded_trees
from skyrl_fast.train.parallel.local_ranks import LocalRanks
from skyrl_fast.train.parallel.rank_processes import start_ranks
from skyrl_fast.train.parallel.ranks import SINGLE_RANK, Ranks
from skyrl_fast.train.parallel.sequence_ranks import SequenceRanks, check_heads

SIZES = [
    pytest.param(("cpu", SHARED), id="two"),
    pytest.param(("cpu", 2 * SHARED), id="twice two", marks=pytest.mark.slow),
    pytest.param(("cuda", SHARED), id="two GPUs", marks=SEVERAL_GPUS),
]


@pytest.fixture(scope="module", params=SIZES)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    device, size = request.param
    starter = LocalRanks(tmp_path_factory.mktemp("ranks"))
    with start_ranks(size, make_models, cuda=device == "cuda", starter=starter) as ranks:
        yield Both(make_models(SINGLE_RANK), make_models(ranks))


CASES: dict[str, tuple[str, AlgorithmConfig]] = {
    "sequences": ("one key head", AlgorithmConfig(use_entropy_loss=True)),
    "prefix trees": ("tree", AlgorithmConfig()),
    "replayed routes": ("experts", AlgorithmConfig()),
    "replayed routes on trees": ("experts on trees", AlgorithmConfig(policy_loss_type="gspo")),
    "activations made again": ("checkpointed", AlgorithmConfig()),
    "loss of the full mini-batch": ("tree", AlgorithmConfig(policy_loss_type="clip_cov")),
    "windows and sinks on trees": ("windows and sinks on trees", AlgorithmConfig()),
    "KL to a reference": ("tree", AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1)),
}


def test_a_checkpoint_names_the_weights_that_each_of_the_ranks_writes(
    both: Both, tmp_path: Path
) -> None:
    policy = both.shared.policies["one key head"]
    folder = tmp_path / "policy"
    policy.save(folder)
    files = both.shared.ranks.files
    files.start(tmp_path)
    files.wait()
    named = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    saved = {name: path.name for path in folder.glob("*.safetensors") for name in load_file(path)}
    assert named == saved
    assert named.keys() == dict(policy.named_weights()).keys()
    assert len({*named.values()}) > 1  # a small model may have no weight for one of four ranks


def by_cost(case: str) -> Any:
    """Return the case as a parameter; the default run has three."""
    quick = case in ("sequences", "replayed routes on trees", "loss of the full mini-batch")
    return pytest.param(case, marks=() if quick else pytest.mark.slow)


@pytest.mark.spec("update.sequence-ranks")
@pytest.mark.parametrize("case", [by_cost(case) for case in CASES])
def test_update_equals_that_of_one_rank(both: Both, case: str) -> None:
    name, algorithm = CASES[case]
    batch = routed(agent_batch(7, num_groups=4)).with_(old_logprobs=None)
    metrics = []
    for models in (both.alone, both.shared):
        torch.manual_seed(2)  # clip_cov draws tokens
        options: dict[str, Any] = {"algorithm": algorithm, "reference": models.reference}
        metrics.append(update(models, name, batch, update_epochs=2, **options))
    assert_close(*(weights(models.policies[name]) for models in (both.alone, both.shared)))
    assert_same_metrics(*metrics)


@pytest.mark.spec("update.sequence-ranks")
def test_logprobs_and_values_equal_those_of_one_rank(both: Both) -> None:
    batch = routed(agent_batch(8))
    kept = kept_tokens(batch)
    for name in both.alone.policies:
        one, other = (models.policies[name] for models in (both.alone, both.shared))
        for rows in (batch, kept):
            got = other.batch_logprobs(rows)
            torch.testing.assert_close(one.batch_logprobs(rows), got, **CLOSE)
    one_critic, other_critic = both.alone.critic, both.shared.critic
    torch.testing.assert_close(
        one_critic.batch_values(batch), other_critic.batch_values(batch), **CLOSE
    )


@pytest.mark.spec("update.ranks-traffic")
def test_exchanged_bytes_are_those_of_the_formula(both: Both) -> None:
    models = both.shared
    policy, config = models.policies["tree"], models.policies["tree"].model.config
    batch, shared = agent_batch(8, num_groups=1), models.ranks.sequence.size
    if models.ranks.size > shared:
        pytest.skip("the formula is of one pass")
    models.ranks.traffic.take()
    policy.batch_logprobs(batch)
    found = models.ranks.traffic.take()
    (micro,) = plan_micro_batches(batch, 1000, tree=True)
    nodes = -(-micro.input_ids.shape[1] // shared) * shared
    # The only key head is repeated before the exchange, as there are more ranks.
    heads = 4 * config.num_attention_heads * (config.hidden_size // config.num_attention_heads)
    wanted = config.num_hidden_layers * 4 * heads * nodes * (shared - 1) // shared**2
    assert found["traffic/sequences_bytes"] == wanted
    assert found["traffic/sequences_messages"] == 4 * config.num_hidden_layers


def kept_tokens(batch: Any) -> Any:
    """Return the batch with 1 to 3 kept tokens of each response token, itself among them."""
    generator = torch.Generator().manual_seed(5)
    counts, ids = [], []
    cu, ends = batch.cu_seqlens.tolist(), batch.cu_responses.tolist()
    for row in range(batch.num_rows):
        size = ends[row + 1] - ends[row]
        for token in batch.tokens[cu[row + 1] - size : cu[row + 1]].tolist():
            others = torch.randint(4, 16, (2,), generator=generator).tolist()
            chosen = sorted({token, *others})
            counts.append(len(chosen))
            ids += chosen
    sums = torch.tensor([0, *counts]).cumsum(0)
    return batch.with_(
        num_kept=torch.tensor(counts, dtype=torch.int32),
        kept_ids=torch.tensor(ids, dtype=torch.int32),
        cu_kept=sums[batch.cu_responses.long()].to(torch.int32),
    )


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_parts_have_every_token_and_every_entry_once(size: int, tree: bool) -> None:
    batch = agent_batch(3)
    for micro in plan_micro_batches(batch, 60, tree=tree):
        parts = [
            padded_trees(micro, torch.device("cpu"), SequenceRanks(rank, size))
            for rank in range(size)
        ]
        length = micro.input_ids.shape[1]
        joined = torch.cat([part.input_ids for part in parts], 1)
        assert torch.equal(joined[:, :length], micro.input_ids)
        assert joined.shape[1] - length < size
        places = torch.cat([part.part.places for part in parts])
        assert places.sort().values.tolist() == list(range(len(micro.hidden_index)))
        for part in parts:
            here = part.part.places
            wanted = micro.input_ids.flatten()[micro.hidden_index[here]]
            assert torch.equal(part.input_ids.flatten()[part.hidden_index], wanted)
            assert torch.equal(part.target_ids, micro.target_ids[here])


def test_what_cannot_be_divided_is_refused() -> None:
    from _fakes import tiny_model

    overrides = ["data.train_data=[a]", "trainer.policy.model.path=a"]
    overrides += ["trainer.placement.policy_num_gpus_per_node=4"]
    with pytest.raises(
        ConfigError, match=r"sequence_parallel_size: expected a divisor .* 4 .*got 3"
    ):
        load_config(None, [*overrides, "trainer.policy.sequence_parallel_size=3"])
    ranks = Ranks()
    ranks.sequence = SequenceRanks(0, 4)
    with pytest.raises(ValueError, match="sequence_parallel_size: wanted a divisor of 2 heads"):
        Policy(tiny_model(), ranks=ranks)
    ranks.sequence = SequenceRanks(0, 2)
    model = tiny_model()
    model.config.alibi = True
    with pytest.raises(ValueError, match=r"size: wanted 1 for this model: .*ALiBi"):
        Policy(model, ranks=ranks)


def test_one_rank_needs_no_number_of_heads() -> None:
    class HeadsByLayer:
        @property
        def num_attention_heads(self) -> int:
            raise RuntimeError("it may vary across layers")  # as transformers' configs do

    check_heads(HeadsByLayer(), 1)
    with pytest.raises(RuntimeError, match="vary"):
        check_heads(HeadsByLayer(), 2)
