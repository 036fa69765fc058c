"""AdamW's moments as shards: each rank writes its own, any number of ranks reads them.

The files are those of `HuggingFaceStorageWriter` of torch.distributed.checkpoint (DCP): safetensors
with the offsets of the shards. DCP reads them; its writer would hold a file in memory once more.

Design: docs/design/020-several-gpus.md.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from skyrl_fast.train.checkpoint.local import damage_error, write_json
from skyrl_fast.train.parallel.ranks import Ranks
from skyrl_fast.train.parallel.sharding import local_tensor

STEPS = "steps.json"
SHARDING_INFO, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # in the metadata of DCP's files
MAX_STEPS = 2**53  # float64 counts up to here
SHARDED = ("exp_avg", "exp_avg_sq")  # the third state of a parameter is its number of steps

State = dict[str, torch.Tensor]


def queue_shards(
    folder: Path,
    step_count: int,
    states: Mapping[str, State],
    unmoved: Sequence[str],
    ranks: Ranks,
    *,
    on_host: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Queue this rank's shards in `ranks.files`, copied to main memory; call it on all ranks.

    The folder exists on rank 0; `unmoved` are parameters without a state. `on_host` returns a
    copy of a local moment.
    """
    if ranks.rank == 0:
        steps = {name: float(state["step"]) for name, state in states.items()}
        counts = {"step_count": step_count, "steps": steps, "without_gradient": list(unmoved)}
        write_json(folder / STEPS, counts)
    shards = {}
    offsets = {}
    for name, state in states.items():
        for key in SHARDED:
            local = local_tensor(state[key])
            # A weight of fewer rows than ranks has no shard on some.
            if local.numel():
                # A copy: the next step changes the moments while the file is written.
                shards[f"{name}.{key}"] = on_host(local)
                offsets[f"{name}.{key}"] = {OFFSETS: _offsets(state[key])}
    file = f"shard-{ranks.rank + 1:05d}-of-{ranks.size:05d}.safetensors"

    def write() -> list[Path]:
        path = folder / file
        save_file(shards, str(path), metadata={SHARDING_INFO: json.dumps(offsets)})
        return [path]

    ranks.files.queue(write)


def _offsets(tensor: Any) -> list[int]:
    """Return where in the full tensor this rank's shard begins."""
    (chunk,) = tensor.__create_chunk_list__()  # DTensor's interface for DCP
    return list(chunk.offsets)


def load_shards(
    folder: Path, parameters: Sequence[tuple[str, torch.Tensor]], ranks: Ranks
) -> tuple[int, dict[str, State]]:
    """Return the step count and AdamW's state by parameter, sharded as it is.

    The folder may have been written by another number of ranks.

    Raises:
        CheckpointError: a file is damaged, or has values that AdamW cannot have written.
        ValueError: a parameter is missing or has another shape, or torch is too old.
    """
    try:
        from torch.distributed.checkpoint import HuggingFaceStorageReader, load
    except ImportError as error:
        raise ValueError(
            f"{folder}: was written by several ranks, and torch {torch.__version__} cannot read "
            "that: expected torch 2.9 or newer"
        ) from error
    step_count, steps, unmoved = _read_steps(folder / STEPS)
    with _name_damage(folder):
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    shapes = {n: getattr(saved, "size", None) for n, saved in metadata.state_dict_metadata.items()}
    states = {}
    for name, parameter in parameters:
        if name in unmoved:
            continue
        for key in SHARDED:
            if name not in steps or f"{name}.{key}" not in shapes:
                raise ValueError(f"{folder}: no optimizer state for {name}: of another model?")
            if shapes[f"{name}.{key}"] != parameter.shape:
                raise ValueError(f"{folder}: optimizer state of {name} has another shape")
        step = torch.tensor(steps[name], dtype=torch.float32, device=parameter.device)
        # Sharded as the parameter is: DCP reads into them the rows that this rank has.
        moments = {key: torch.zeros_like(parameter.detach()) for key in SHARDED}
        states[name] = {**moments, "step": step}
    tensors = {f"{n}.{key}": state[key] for n, state in states.items() for key in SHARDED}
    with _name_damage(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # with one rank
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=ranks.size == 1)
    for name, state in states.items():
        check_moments(name, state, folder)
    return step_count, states


@contextmanager
def _name_damage(folder: Path) -> Iterator[None]:
    """Raise CheckpointError in place of what DCP raises about files that it cannot read."""
    from torch.distributed.checkpoint.api import CheckpointException  # no Exception

    try:
        yield
    except (CheckpointException, SafetensorError, LookupError, OSError, ValueError) as error:
        raise damage_error(folder, f"{type(error).__name__}: {error}") from error


def check_moments(name: str, state: State, path: Path) -> None:
    """Raise CheckpointError if AdamW cannot have written this state, or shard, of a parameter."""
    values = {key: local_tensor(value) for key, value in state.items()}
    if bool(values["exp_avg"].isnan().any()):
        raise damage_error(path, f"{name}.exp_avg: expected numbers, got NaN")
    for key in ("exp_avg_sq", "step"):
        if not bool((values[key] >= 0).all()):
            raise damage_error(path, f"{name}.{key}: expected no negative values, and no NaN")


def check_step_count(step_count: int, path: Path) -> None:
    if not 0 <= step_count < MAX_STEPS:
        raise damage_error(path, f"step_count: expected 0 to 2^53, got {step_count}")


def _read_steps(path: Path) -> tuple[int, dict[str, float], set[str]]:
    """Return the step count, the steps of each parameter, and those without a state."""
    try:
        counts = json.loads(path.read_text(encoding="utf-8"))
        steps = {}
        for name, step in counts["steps"].items():
            steps[str(name)] = float(step)
        step_count = int(counts["step_count"])
        unmoved = set(counts["without_gradient"])
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        raise damage_error(path, f"no optimizer state: {type(error).__name__}: {error}") from error
    check_step_count(step_count, path)
    return step_count, steps, unmoved
