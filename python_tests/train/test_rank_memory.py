"""What a rank allocates where all weights pass: docs/design/022, "What a rank allocates"."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from _memory import config_of
from _rank_memory import counted

from skyrl_fast.rollout.engine.weights.transports.file import send_by_file
from skyrl_fast.train.parallel.local_ranks import LocalRanks
from skyrl_fast.train.parallel.rank_processes import start_ranks

BUCKET = 1 << 15  # bytes: of the smallest buckets on ranks' devices
SMALL = 1 << 13  # bytes: norms, numbers, messages
FLOAT32 = 4  # bytes of a trained value
BFLOAT16 = 2  # bytes of a value that an engine gets, and of one that the model's files have
SIZES = {"vocab_size": 256, "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 8}


def make_model(kind: str) -> Any:
    """Return a model with random weights in bfloat16."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    if kind == "experts":  # of each layer one tensor in the model, several in a file
        config = config_of("qwen3_moe", **SIZES, mlp_only_layers=[])
    else:
        config = config_of("qwen2", **SIZES, intermediate_size=256)
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes that each rank has allocated, and the numbers of values by which they are bounded.

    Args:
        shard: values of the weights of a rank.
        layer, tensor: values of the largest one; `expert`: of one of a layer's, its gates joined.
        whole: all values.
    """

    loading: list[int]
    syncing: list[int]
    sharing: list[int]
    saving: list[int]
    resuming: list[int]
    shard: int
    layer: int
    tensor: int
    expert: int
    whole: int


@pytest.fixture(scope="module", params=[(2, "dense"), (4, "dense"), (2, "experts")], ids=str)
def peaks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Peaks:
    """Load, step, send, save and resume a model by several ranks."""
    size, kind = request.param
    folder = tmp_path_factory.mktemp("ranks")
    model = make_model(kind)
    model.save_pretrained(folder / "model", max_shard_size="100KB")
    make = partial(counted, folder=folder / "model")
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    with start_ranks(size, make, cuda=False, starter=LocalRanks(folder)) as ranks:
        one = make(ranks)
        one.step()
        one.begin()
        weights = one.policy.named_weights(torch.bfloat16)
        with send_by_file(weights, torch.bfloat16, folder=str(folder)):
            syncing = one.peaks()
        one.begin()
        for bucket in weights.share(torch.bfloat16, BUCKET).pack():
            del bucket
        sharing = one.peaks()
        one.begin()
        one.policy.save(checkpoint / "policy")
        one.optimizer.save(checkpoint)
        ranks.files.start(checkpoint)
        ranks.files.wait()
        saving = one.peaks()
        one.forget()
        one.begin()
        one.optimizer.load(checkpoint)
        resuming = one.peaks()
        shards = max(one.shards())
        loading = one.peaks_of_loading()
    values = [value.numel() for value in model.parameters()]
    return Peaks(
        loading,
        syncing,
        sharing,
        saving,
        resuming,
        shard=shards // FLOAT32,
        layer=sum(value.numel() for value in model.model.layers[0].parameters()),
        tensor=max(values),
        expert=2 * model.config.hidden_size * getattr(model.config, "moe_intermediate_size", 0),
        whole=sum(values),
    )


@pytest.mark.spec("update.ranks-memory")
def test_no_rank_allocates_more_than_its_shard_and_a_stored_tensor(peaks: Peaks) -> None:
    shard = FLOAT32 * peaks.shard
    stored = FLOAT32 * peaks.tensor  # as a checkpoint has it
    # One expert as it is cast, stacked, joined, and returned.
    made = 4 * FLOAT32 * peaks.expert
    for peak in peaks.loading:
        assert shard <= peak <= shard + max(BFLOAT16 * peaks.tensor, made) + SMALL
    for peak in peaks.resuming:  # two moments
        assert 2 * shard <= peak <= 2 * shard + stored + SMALL
    for peak in peaks.saving:  # weights, of which no layer is divided, and moments
        assert 2 * shard < peak <= 3 * shard + FLOAT32 * peaks.layer + stored + SMALL
    first, *others = peaks.syncing
    assert first > BFLOAT16 * peaks.layer
    # A layer as the engine gets it, and a weight that is gathered, and cast.
    assert first <= BFLOAT16 * peaks.layer + stored + BFLOAT16 * peaks.tensor + SMALL
    for peak in others:
        assert 0 < peak <= stored + SMALL
    # Two buckets, and what rank 0 holds of a file. Of one bucket the tensors wait to be packed.
    slot = max(BUCKET, BFLOAT16 * peaks.tensor)
    gathered = BFLOAT16 * peaks.layer + stored + BFLOAT16 * peaks.tensor
    for peak in peaks.sharing:
        assert 2 * slot < peak <= 2 * slot + gathered + slot + SMALL


def test_the_bounds_are_less_than_the_model(peaks: Peaks) -> None:
    whole = FLOAT32 * peaks.whole
    assert max(peaks.loading) < whole
    assert max(peaks.resuming) < 2 * whole
    assert max(peaks.saving) < 3 * whole
    assert max(peaks.syncing) < BFLOAT16 * peaks.whole
    assert max(peaks.sharing) < BFLOAT16 * peaks.whole
