"""Checkpoints that several ranks write: the same values for any number of ranks, never half."""

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from _rank_models import CPU, Saved, resumed_models, saved_models
from _training import folder as folder
from _training import settings, train
from safetensors import safe_open
from safetensors.torch import load_file

from skyrl_fast.train import trainer as trainer_module
from skyrl_fast.train.checkpoint.local import (
    CheckpointError,
    checkpoints,
    newest_intact,
    verify_checkpoint,
    write_json,
)
from skyrl_fast.train.checkpoint.remote import CheckpointStore, download
from skyrl_fast.train.checkpoint.writer import CheckpointWriter
from skyrl_fast.train.model.loading import load_model
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.parallel.export import writers
from skyrl_fast.train.parallel.local_ranks import LocalRanks
from skyrl_fast.train.parallel.rank_processes import start_ranks
from skyrl_fast.train.parallel.ranks import SINGLE_RANK

STATE = {
    "sampler": {"num_prompts": 4, "batch_size": 2, "position": 0, "epoch": 0, "seed": 0},
    "random": {"python": [3, [0] * 625, None], "numpy": ["MT19937", [0] * 624, 0, 0, 0.0]},
}


@contextmanager
def models(
    folder: Path, size: int, checkpoint: Path | None = None, *, experts: bool = False
) -> Iterator[Saved]:
    """Yield the models of rank 0 among some ranks."""
    make = partial(saved_models, checkpoint=checkpoint, experts=experts)
    if size == 1:
        yield make(SINGLE_RANK)
        return
    with start_ranks(size, make, cuda=False, starter=LocalRanks(folder)) as ranks:
        yield make(ranks)


def begin(writer: CheckpointWriter, step: int, saved: Saved) -> None:
    def write(folder: Path) -> None:
        saved.save(folder)
        write_json(folder / "state.json", {**STATE, "step": step})

    writer.write(step, write)


def written(folder: Path, step: int, saved: Saved) -> Path:
    """Write a checkpoint and wait for it."""
    writer = CheckpointWriter(folder, keep=-1, ranks=saved.ranks)
    begin(writer, step, saved)
    writer.wait()
    finished = writer.take_finished()
    assert finished is not None and finished[0] == step and writer.take_finished() is None
    verify_checkpoint(finished[1])
    return finished[1]


def assert_equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


@pytest.mark.slow  # starts ten times as many processes
@pytest.mark.timeout(1200)
@pytest.mark.spec("update.ranks-checkpoint")
def test_any_number_of_ranks_resumes_the_checkpoint_of_any_other(tmp_path: Path) -> None:
    """Experts, whose weights have other names in checkpoints, and a head of a single row.

    What is resumed has the bits of what was saved. A step may round otherwise: the vector
    instructions of a processor end elsewhere in shards of other sizes.
    """
    sizes = (1, 2, 3, 4, 8)
    folder = tmp_path / "checkpoints"
    paths, values, after = [], [], []
    for size in sizes:
        with models(tmp_path, size, experts=True) as saved:
            saved.step(0)
            values.append(saved.values())
            paths.append(written(folder, size, saved))
            saved.step(1)
            after.append(saved.values())
    names = [sorted(load_keys(path / "policy")) for path in paths]
    assert all(each == names[0] for each in names)  # those of one rank
    assert any(".experts.1." in name for name in names[0])
    for size in sizes:
        with resumed(tmp_path, size, paths) as found:
            for number, saved in enumerate(found):
                saved.restore(paths[number])
                assert_equal(saved.values(), values[number])
                saved.step(1)
                torch.testing.assert_close(saved.values(), after[number], rtol=1e-6, atol=1e-7)
                torch.testing.assert_close(saved.values(), after[0], rtol=1e-5, atol=1e-6)


@contextmanager
def resumed(folder: Path, size: int, paths: Sequence[Path]) -> Iterator[list[Saved]]:
    """Yield the models of each checkpoint on rank 0 among some ranks, not yet restored."""
    make = partial(resumed_models, checkpoints=paths)
    if size == 1:
        yield make(SINGLE_RANK)
        return
    with start_ranks(size, make, cuda=False, starter=LocalRanks(folder)) as ranks:
        yield make(ranks)


def load_keys(folder: Path) -> list[str]:
    found = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found += list(file.keys())
    return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    with models(tmp_path_factory.mktemp("ranks"), 2) as saved:
        saved.step(0)
        yield saved


@pytest.mark.spec("update.ranks-checkpoint")
def test_each_rank_writes_its_files_and_transformers_loads_them(
    shared: Saved, tmp_path: Path
) -> None:
    path = written(tmp_path, 1, shared)
    files = {p.relative_to(path).as_posix() for p in path.rglob("*.safetensors")}
    assert files == {
        f"{folder}{file}"
        for folder in ("", "critic/")
        for file in (
            *(f"optimizer/shard-0000{r}-of-00002.safetensors" for r in (1, 2)),
            *(f"{'' if folder else 'policy/'}model-0000{r}-of-00002.safetensors" for r in (1, 2)),
        )
    } | {"critic/value_head.safetensors"}
    for shards in (path / "optimizer", path / "critic/optimizer"):
        one, two = (sum(v.numel() for v in load_file(f).values()) for f in shards.glob("*.saf*"))
        assert one == pytest.approx(two, rel=0.1)
    loaded = load_model(str(path / "policy"), device=CPU)
    assert loaded.config.architectures == ["Qwen2ForCausalLM"]
    wanted = dict(shared.policy.named_weights())
    for name, value in loaded.named_parameters():
        assert torch.equal(value, wanted[name]), name
    index = json.loads((path / "policy/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())
    assert index["weight_map"].keys() == wanted.keys()


def test_a_layer_is_written_by_one_rank() -> None:
    model, layer_bytes = model_of_layers(8)
    found = writers(model, 3)
    of_layer: dict[str, set[int]] = {}
    for name, rank in found.items():
        layer = ".".join(name.split(".")[:3]) if ".layers." in name else name
        of_layer.setdefault(layer, set()).add(rank)
    assert all(len(ranks) == 1 for ranks in of_layer.values())
    assert list(found.values()) == sorted(found.values())
    share = [
        sum(p.nbytes for n, p in model.named_parameters() if found[n] == rank) for rank in range(3)
    ]
    assert max(share) - min(share) <= layer_bytes


def model_of_layers(count: int) -> tuple[torch.nn.Module, int]:
    """Return a model and the bytes of a layer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, num_hidden_layers=count))
    return model, sum(p.nbytes for p in model.model.layers[0].parameters())


@pytest.mark.spec("update.ranks-checkpoint-background")
def test_updates_during_the_save_do_not_change_the_checkpoint(
    shared: Saved, tmp_path: Path
) -> None:
    trained = threading.Event()

    def late() -> list[Path]:
        assert trained.wait(60)
        return []

    shared.ranks.files.queue(late)  # before rank 0's files
    before = shared.values()
    writer = CheckpointWriter(tmp_path, keep=-1, ranks=shared.ranks)
    begin(writer, 1, shared)
    shared.step(1)
    assert writer.take_finished() is None and newest_intact(tmp_path) == (None, [])
    trained.set()
    writer.wait()
    finished = writer.take_finished()
    assert finished is not None
    after = shared.values()
    shared.restore(finished[1])
    restored = shared.values()
    moments = [name for name in before if name.endswith(("exp_avg", "exp_avg_sq"))]
    assert moments and any(not torch.equal(before[name], after[name]) for name in moments)
    assert_equal({n: restored[n] for n in moments}, {n: before[n] for n in moments})
    policy = load_model(str(finished[1] / "policy"), device=CPU)
    for name, value in policy.named_parameters():
        assert torch.equal(value, before[f"0.{name}"])


@pytest.mark.spec("update.ranks-checkpoint-background")
@pytest.mark.parametrize("rank", [0, 1])
def test_error_of_a_rank_is_named_and_leaves_no_checkpoint(
    shared: Saved, tmp_path: Path, rank: int
) -> None:
    kept = written(tmp_path, 1, shared)
    shared.queue(rank, full_disk)
    writer = CheckpointWriter(tmp_path, keep=-1, ranks=shared.ranks)
    begin(writer, 2, shared)
    writer.wait()
    text = rf"step 2 not written .*disk is full; the checkpoint {kept} is intact"
    with pytest.raises(CheckpointError, match=text) as error:
        writer.take_finished()
    assert f"rank {rank}: OSError" in str(error.value.__cause__)
    assert sorted(tmp_path.iterdir()) == [kept]
    assert written(tmp_path, 2, shared).name == "step_000002"  # the ranks are in sync


def full_disk() -> list[Path]:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_files_of_all_ranks_are_uploaded(shared: Saved, tmp_path: Path) -> None:
    store = CheckpointStore(f"file://{tmp_path}/store", keep=1)
    writer = CheckpointWriter(tmp_path / "a", keep=-1, ranks=shared.ranks, upload=store.upload)
    begin(writer, 1, shared)
    writer.wait()
    path = tmp_path / "a/step_000001"
    assert writer.take_finished() == (1, path)
    copy = download(f"{store.url}/step_000001", tmp_path / "copy")
    names = [
        sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*"))
        for folder in (copy, path)
    ]
    assert names[0] == names[1] and "optimizer/shard-00002-of-00002.safetensors" in names[0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_moments_are_in_a_format_of_torch(shared: Saved, tmp_path: Path) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    path = written(tmp_path, 1, shared)
    expected = {}
    for name, value in shared.values().items():
        model, _, parameter = name.partition(".")
        if model == "0" and parameter.endswith((".exp_avg", ".exp_avg_sq")):
            expected[parameter] = value
    found = {name: torch.zeros_like(value) for name, value in expected.items()}
    reader = HuggingFaceStorageReader(str(path / "optimizer"))
    load(found, storage_reader=reader, no_dist=True)
    assert expected
    assert_equal(found, expected)


@pytest.mark.spec("async.checkpoint-state")
@pytest.mark.parametrize("damage", ["step_count", "negative", "other", "cut", "bytes", "lost"])
def test_impossible_shards_are_damage(shared: Saved, tmp_path: Path, damage: str) -> None:
    path = written(tmp_path, 12, shared)
    steps = path / "optimizer/steps.json"
    content = json.loads(steps.read_text())
    name = next(iter(content["steps"]))
    if damage == "step_count":
        content["step_count"] = -1
    elif damage == "negative":
        content["steps"][name] = -1
    elif damage == "other":
        del content["steps"][name]
    steps.write_text(json.dumps(content))
    shard = path / "optimizer/shard-00002-of-00002.safetensors"
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif damage == "bytes":
        shard.write_bytes(shard.read_bytes()[:8] + b"x" * 1000)
    elif damage == "lost":
        shard.with_name("shard-00001-of-00002.safetensors").unlink()
    with models(tmp_path, 1, path) as alone:
        wanted = {
            "step_count": r"step 12 is damaged: .*steps.json: step_count: expected 0",
            "negative": rf"step 12 is damaged: .*{name}.step: expected no negative",
            "cut": "step 12 is damaged: .*optimizer: ValueError",
            "bytes": "step 12 is damaged: .*optimizer: ValueError",
            "lost": "step 12 is damaged: .*optimizer: ValueError: expected rows 0 to",
            "other": f"no optimizer state for {name}: of another model",
        }
        with pytest.raises((CheckpointError, ValueError), match=wanted[damage]):
            alone.restore(path)


def test_shards_of_another_model_are_refused(shared: Saved, tmp_path: Path) -> None:
    path = written(tmp_path, 1, shared)
    other = saved_models(SINGLE_RANK, experts=True)
    with pytest.raises(ValueError, match=r"no optimizer state for|another shape"):
        other.restore(path)


class Late(CheckpointWriter):
    """Fails to complete the first checkpoint, after its `write` has returned."""

    failed = False

    def write(self, step: int, write_state: Callable[[Path], None]) -> None:
        super().write(step, write_state)
        if not Late.failed:
            Late.failed = True
            _, path = self.take_finished() or (0, Path())
            shutil.rmtree(path)
            future: Future[Path] = Future()
            future.set_exception(CheckpointError("the disk is full"))
            self._writing = step, future


def test_error_in_the_background_ends_the_run_at_the_next_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Late, "failed", False)
    monkeypatch.setattr(trainer_module, "CheckpointWriter", Late)
    with pytest.raises(CheckpointError, match="the disk is full"):
        train(settings(folder, "run"))
    assert [step for step, _ in checkpoints(folder / "run/checkpoints")] == [2]  # tried again
    assert read_metrics(folder / "run/metrics.jsonl")[-1]["step"] == 2
    assert train(settings(folder, "run", "trainer.resume_mode=latest")).step == 6
