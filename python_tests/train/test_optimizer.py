"""AdamW with moments in 8 bits, by torchao: steps, bytes, files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from _rank_models import saved_models
from safetensors.torch import load_file, save_file

from skyrl_fast.config import OptimizerConfig
from skyrl_fast.train.checkpoint.local import CheckpointError
from skyrl_fast.train.checkpoint.optimizer_shards import SHARDED
from skyrl_fast.train.model.optimizer import Optimizer
from skyrl_fast.train.parallel.local_ranks import LocalRanks
from skyrl_fast.train.parallel.rank_processes import start_ranks
from skyrl_fast.train.parallel.ranks import SINGLE_RANK, Ranks
from skyrl_fast.train.parallel.sharding import local_tensor

SHAPES = {"matrix": (64, 256), "odd": (67, 64), "bias": (64,)}  # the first has moments in 8 bits
FILE = "optimizer.safetensors"
CONFIG = OptimizerConfig(optimizer="adamw_8bit", lr=1e-2, max_grad_norm=0, num_warmup_steps=4)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The compiled step sums no values of two threads, but compiles faster."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Weights:
    """Parameters without a model."""

    named: dict[str, torch.Tensor]
    ranks: Ranks = SINGLE_RANK

    def trained_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.named.items())


def make(config: OptimizerConfig = CONFIG) -> tuple[Optimizer, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    named = {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in SHAPES.items()
    }
    return Optimizer(Weights(named), config, total_steps=9), named


def steps(optimizer: Optimizer, named: dict[str, torch.Tensor], *seeds: int) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ValueError, match=r"adamw_8bit: expected a torchao for torch .*\[torchao\]"):
        make()


@pytest.mark.spec("update.8-bit")
def test_steps_are_torchaos_and_near_those_of_float32() -> None:
    torchao = pytest.importorskip("torchao.optim")
    optimizer, named = make()
    start = {name: value.detach().clone() for name, value in named.items()}
    exact, others = make(OptimizerConfig(lr=1e-2, max_grad_norm=0, num_warmup_steps=4))
    steps(optimizer, named, *range(6))
    steps(exact, others, *range(6))
    plain = {name: torch.nn.Parameter(value) for name, value in make()[1].items()}
    theirs = torchao.AdamW8bit(
        [
            {"params": [plain["matrix"], plain["odd"]]},
            {"params": [plain["bias"]], "weight_decay": 0},
        ],
        lr=1e-2,
    )
    for seed, rate in enumerate((0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01)):
        generator = torch.Generator().manual_seed(seed)
        for parameter in plain.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for group in theirs.param_groups:
            group["lr"].fill_(rate)
        theirs.step()
    for name, value in named.items():
        assert torch.equal(value, plain[name]), name
        moved = (others[name] - start[name]).abs().mean()
        # codes have about two digits; float32 moments differ by the order of operations
        close = 0.05 if name == "matrix" else 1e-4
        assert (value - others[name]).abs().mean() < close * moved, name


@pytest.mark.spec("update.8-bit", "memory.plan")
def test_moments_take_the_bytes_of_the_plan() -> None:
    pytest.importorskip("torchao.optim")
    from skyrl_fast.train.memory.parts import moment_bytes

    optimizer, named = make()
    steps(optimizer, named, 0)
    tensors = dict(optimizer._local_tensors())
    of_matrix = [t for name, t in tensors.items() if name.startswith("matrix.exp_avg")]
    assert sum(t.nbytes for t in of_matrix) == moment_bytes(CONFIG) * named["matrix"].numel()
    assert tensors["odd.exp_avg"].dtype == torch.float32  # no multiple of a block
    assert moment_bytes(OptimizerConfig()) == 8


@pytest.mark.spec("update.8-bit")
def test_a_loaded_state_continues_bit_by_bit(tmp_path: Path) -> None:
    pytest.importorskip("torchao.optim")
    optimizer, named = make()
    steps(optimizer, named, 0, 1, 2)
    optimizer.save(tmp_path)
    resumed, others = make()
    with torch.no_grad():
        for name, value in named.items():
            others[name].copy_(value)
    resumed.load(tmp_path)
    steps(optimizer, named, 3, 4)
    steps(resumed, others, 3, 4)
    assert all(torch.equal(value, others[name]) for name, value in named.items())
    folders = tmp_path / "one", tmp_path / "two"
    for one, folder in zip((optimizer, resumed), folders, strict=True):
        folder.mkdir()
        one.save(folder)
    assert (folders[0] / FILE).read_bytes() == (folders[1] / FILE).read_bytes()


def moments_on_device(optimizer: Optimizer) -> set[int]:
    """Return how many bytes the moments take there."""
    states = optimizer.adamw.state.values()
    return {local_tensor(s[key]).untyped_storage().nbytes() for s in states for key in SHARDED}


@pytest.mark.spec("update.offload")
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_moments_that_leave_after_a_step_change_no_bit(name: str, tmp_path: Path) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("torchao.optim")
    stays = OptimizerConfig(optimizer=name, lr=1e-2)
    leaves = replace(stays, offload_after_step=True)
    one, weights = make(stays)
    other, others = make(leaves)
    for optimizer, named in ((one, weights), (other, others)):
        named["bias"].requires_grad_(False)  # whose first gradient comes later
        steps(optimizer, named, 0, 1)
        named["bias"].requires_grad_(True)
        steps(optimizer, named, 2)
    if name == "adamw":
        assert moments_on_device(other) == {0} != moments_on_device(one)
    folders = {"stays": one, "leaves": other}
    for folder, optimizer in folders.items():
        (tmp_path / folder).mkdir()
        optimizer.save(tmp_path / folder)
    files = [(tmp_path / folder / FILE).read_bytes() for folder in folders]
    assert files[0] == files[1]
    resumed, third = make(leaves)
    with torch.no_grad():
        for key, value in others.items():
            third[key].copy_(value)
    resumed.load(tmp_path / "leaves")
    steps(resumed, third, 3)
    steps(other, others, 3)
    steps(one, weights, 3)
    assert all(torch.equal(value, weights[key]) for key, value in others.items())
    assert all(torch.equal(value, weights[key]) for key, value in third.items())


@pytest.mark.spec("update.offload")
def test_the_bytes_that_move_are_counted() -> None:
    optimizer, named = make(OptimizerConfig(offload_after_step=True))
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    moments = 2 * sum(value.nbytes for value in named.values())
    assert optimizer.step()["policy/offloaded_bytes"] == moments
    still, named = make(OptimizerConfig())
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    assert "policy/offloaded_bytes" not in still.step()


@pytest.mark.spec("update.offload")
def test_ranks_save_moments_that_have_left(tmp_path: Path) -> None:
    values = []
    for offload in (False, True):
        folder = tmp_path / f"offload-{offload}"
        folder.mkdir()
        made = partial(saved_models, offload=offload)
        with start_ranks(2, made, cuda=False, starter=LocalRanks(tmp_path)) as ranks:
            models = made(ranks)
            models.step(0)
            models.save(folder)
            ranks.files.start(folder)
            ranks.files.wait()
        models = saved_models(SINGLE_RANK, checkpoint=folder, offload=not offload)
        models.restore(folder)
        models.step(1)
        values.append(dict(models.policy.named_weights()))
    first, second = values
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_moments_of_a_parameter_without_dimensions_are_loaded(tmp_path: Path) -> None:
    def made() -> Optimizer:
        named = {"scale": torch.nn.Parameter(torch.tensor(2.0))}
        return Optimizer(Weights(named), OptimizerConfig(), total_steps=9)

    optimizer = made()
    (parameter,) = optimizer.adamw.param_groups[0]["params"]
    parameter.grad = torch.tensor(0.5)
    optimizer.step()
    optimizer.save(tmp_path)
    resumed = made()
    resumed.load(tmp_path)
    (other,) = resumed.adamw.param_groups[0]["params"]
    for key in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(resumed.adamw.state[other][key], optimizer.adamw.state[parameter][key])


def _without_scale(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["matrix.exp_avg.scale"]


def _of_other_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["matrix.exp_avg.codes"] = tensors["matrix.exp_avg.codes"][1:].contiguous()


def _negative(tensors: dict[str, torch.Tensor]) -> None:
    tensors["matrix.exp_avg_sq.scale"][3] = -1.0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            _without_scale,
            ValueError,
            r"no exp_avg\.scale for matrix: of another model or optimizer",
        ),
        (_of_other_shape, ValueError, r"exp_avg\.codes of matrix has another shape"),
        (_negative, CheckpointError, "exp_avg_sq: expected no negative values"),
    ],
)
def test_impossible_8_bit_moments_are_refused(
    change: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    pytest.importorskip("torchao.optim")
    optimizer, named = make()
    steps(optimizer, named, 0)
    folder = tmp_path / "step_000012"
    folder.mkdir()
    optimizer.save(folder)
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, metadata={"step_count": "1"})
    with pytest.raises(error, match=message):
        make()[0].load(folder)


def test_moments_of_the_other_optimizer_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("torchao.optim")
    for config, other in ((CONFIG, OptimizerConfig()), (OptimizerConfig(), CONFIG)):
        optimizer, named = make(config)
        steps(optimizer, named, 0)
        optimizer.save(tmp_path)
        with pytest.raises(ValueError, match=r"for matrix: of another model or optimizer\?"):
            make(other)[0].load(tmp_path)


@pytest.mark.spec("update.8-bit")
def test_ranks_load_their_moments_bit_by_bit(tmp_path: Path) -> None:
    pytest.importorskip("torchao.optim")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    made = partial(saved_models, optimizer_name="adamw_8bit")
    with start_ranks(2, made, cuda=False, starter=LocalRanks(tmp_path)) as ranks:
        models = made(ranks)
        models.step(0)
        models.save(folder)
        ranks.files.start(folder)
        ranks.files.wait()
        models.step(1)
        expected = dict(models.policy.named_weights())
    names = {path.name for path in (folder / "optimizer").iterdir()}
    assert names == {f"rank-0000{rank}-of-00002.safetensors" for rank in (1, 2)}
    made = partial(made, checkpoint=folder)
    with start_ranks(2, made, cuda=False, starter=LocalRanks(tmp_path)) as ranks:
        models = made(ranks)
        models.restore(folder)
        models.step(1)
        found = dict(models.policy.named_weights())
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    with pytest.raises(ValueError, match="with as many ranks as wrote them, got none for 1"):
        made(SINGLE_RANK).optimizer.load(folder)
    with pytest.raises(ValueError, match="expected moments of adamw, got those of adamw_8bit"):
        make(OptimizerConfig())[0].load(folder)
