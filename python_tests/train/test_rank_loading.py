"""Loading with several ranks: none of them holds the model; docs/spec.md section 7."""

import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _memory import LiveBytes, config_of
from _rank_loading import CPU, Loaded, load_all
from safetensors.torch import load_file, save_file

from skyrl_fast.rollout.engine.weights.transports.file import send_by_file
from skyrl_fast.train.model.loading import load_model
from skyrl_fast.train.parallel import stored_weights
from skyrl_fast.train.parallel.local_ranks import LocalRanks
from skyrl_fast.train.parallel.rank_processes import start_ranks
from skyrl_fast.train.parallel.ranks import SINGLE_RANK, Ranks
from skyrl_fast.train.parallel.sharding import weights_of
from skyrl_fast.train.parallel.stored_weights import UNREAD

NUM_RANKS = 3  # neither a power of two nor a divisor of the widths
EXPERTS = 4
SMALL = 1 << 12  # bytes: norms, buffers, numbers
SIZES = {"vocab_size": 258, "hidden_size": 64, "intermediate_size": 130, "head_dim": 16}


def make_model(kind: str, **settings: Any) -> Any:
    """Return a model with random weights in bfloat16."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = config_of(kind, **{**SIZES, "num_hidden_layers": 3, **settings})
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16)


def save_folders(folder: Path) -> dict[str, Path]:
    """Save models whose weights are stored in different ways."""
    folders = {}
    for name, model in (
        ("dense", make_model("qwen2")),  # tied, in several files
        ("experts", make_model("qwen3_moe")),  # of each layer one tensor in the model
        ("routers", make_model("deepseek_v3")),  # which have buffers
        ("deep", make_model("qwen2", num_hidden_layers=8, intermediate_size=2050)),
    ):
        folders[name] = folder / name
        model.save_pretrained(folders[name], max_shard_size="100KB")
    folders["pickled"] = folder / "pickled"
    make_model("llama").save_pretrained(folders["pickled"])
    torch.save(load_file(folders["pickled"] / "model.safetensors"), folder / "weights.bin")
    (folders["pickled"] / "model.safetensors").unlink()
    (folder / "weights.bin").rename(folders["pickled"] / "pytorch_model.bin")
    return folders


@dataclass(slots=True)
class Both:
    """The same models, loaded by one process and by several."""

    folders: dict[str, Path]
    alone: Loaded
    shared: Loaded
    messages: list[str]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("loading")
    folders = save_folders(folder)
    make = partial(load_all, folders=folders)
    records = Records()
    stored_weights.logger.addHandler(records)
    with start_ranks(NUM_RANKS, make, cuda=False, starter=LocalRanks(folder)) as ranks:
        shared = make(ranks)
        yield Both(folders, make(SINGLE_RANK), shared, records.messages)
    stored_weights.logger.removeHandler(records)


class Records(logging.Handler):
    """The messages of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def largest_stored(folder: Path) -> int:
    """Return the bytes of the largest tensor of a folder's files."""
    sizes = []
    for file in folder.glob("*.safetensors"):
        sizes += [tensor.nbytes for tensor in load_file(file).values()]
    return max(sizes)


@pytest.mark.spec("update.ranks-loading")
@pytest.mark.parametrize("name", ["dense", "critic", "adapter"])
def test_a_rank_allocates_its_shard_and_rows_of_a_stored_tensor(both: Both, name: str) -> None:
    whole = sum(value.nbytes for value in both.alone.models[name].parameters())
    measured = both.shared.measurements(name)
    # FSDP2 pads the shards of all ranks to the size of the first one's.
    shards = max(shards for _, shards in measured)
    assert shards < whole / 2
    rows = largest_stored(both.folders["dense"]) / NUM_RANKS
    for peak, _ in measured:
        assert peak <= shards + rows + SMALL < whole


@pytest.mark.parametrize("name", ["experts", "routers"])
def test_experts_of_the_rank_are_made_one_after_another(both: Both, name: str) -> None:
    whole = sum(value.nbytes for value in both.alone.models[name].parameters())
    measured = both.shared.measurements(name)
    shards = max(shards for _, shards in measured)
    largest = max(value.nbytes for value in both.alone.models[name].parameters())
    expert = largest / EXPERTS
    for peak, _ in measured:
        # An expert as it is cast, stacked, joined, and returned.
        assert peak <= shards + 4 * expert + SMALL < whole


def test_weights_are_those_of_one_process(both: Both) -> None:
    for name, alone in both.alone.models.items():
        shared = both.shared.weights(name)
        expected = dict(weights_of(alone))
        assert shared.keys() == expected.keys()
        for key, value in expected.items():
            assert shared[key].dtype == value.dtype, key
            assert torch.equal(shared[key], value), key
        buffers = dict(both.shared.models[name].named_buffers())
        for key, value in alone.named_buffers():
            assert torch.equal(buffers[key], value), key
        # What is drawn next is the same, too.
        assert both.shared.draws[name] == both.alone.draws[name]


def test_other_files_are_read_as_a_whole_and_said_so_once(both: Both) -> None:
    (message,) = both.messages
    assert "pickled: each rank loads all weights before it keeps its shard" in message
    whole = sum(value.nbytes for value in both.alone.models["pickled"].parameters())
    for peak, _ in both.shared.measurements("pickled"):
        assert peak > whole


@pytest.mark.spec("update.ranks-loading")
def test_checks_of_a_policy_compute_the_sharded_model(both: Both) -> None:
    assert both.shared.policy is not None and both.alone.policy is not None
    assert both.shared.policy.head.logit_scale == both.alone.policy.head.logit_scale
    assert both.shared.policy.head.soft_cap == both.alone.policy.head.soft_cap
    assert both.shared.policy.tree == both.alone.policy.tree


def test_a_weight_file_is_written_while_weights_are_gathered(both: Both, tmp_path: Path) -> None:
    assert both.shared.policy is not None and both.alone.policy is not None
    weights = both.shared.policy.named_weights(torch.bfloat16)

    def send() -> None:
        with send_by_file(weights, torch.bfloat16, folder=str(tmp_path)) as call:
            (path,) = call.arguments
            shutil.copy(path, tmp_path / "copy")

    with LiveBytes() as live:
        send()
    sent = load_file(tmp_path / "copy")
    # A layer in bfloat16, and a weight that is gathered, cast, and written.
    assert live.peak < sum(value.nbytes for value in sent.values()) / 2
    expected = dict(both.alone.policy.named_weights())
    assert sent.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(sent[name], value.to(torch.bfloat16)), name


def test_a_checkpoint_copies_to_a_rank_what_it_writes(both: Both, tmp_path: Path) -> None:
    model = both.alone.models["deep"]
    whole = sum(p.nbytes for p in model.parameters())
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    largest = max(p.nbytes for p in model.parameters())
    for peak in both.shared.queue_weights(tmp_path):
        # No layer is divided; each weight is gathered by itself.
        assert peak <= whole / NUM_RANKS + layer + 2 * largest < whole


def test_missing_weights_are_drawn_as_before(tmp_path: Path) -> None:
    """transformers draws them from the random state, so that all weights are read as before."""
    folder = tmp_path / "model"
    make_model("llama").save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(str(folder), device=CPU, ranks=Ranks(0, 2))
    assert not any(value.is_meta for value in loaded.parameters())
    assert UNREAD not in vars(loaded)
