"""AdamW's moments as shards: each rank writes its own, any number of ranks reads them.

The files are those of `HuggingFaceStorageWriter` of torch.distributed.checkpoint (DCP): safetensors
with the offsets of the shards, which DCP reads, too. Its writer would hold a file in memory once
more; for its reader rank 0 would gather what each rank reads. Here a rank reads its own rows.

Design: docs/design/020-several-gpus.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from skyrl_fast.rollout.engine.weights.tensor_file import (
    METADATA,
    StoredTensor,
    list_tensors,
    read_header,
)
from skyrl_fast.train.checkpoint.local import damage_error, write_json
from skyrl_fast.train.parallel.ranks import Ranks
from skyrl_fast.train.parallel.sharding import like_shard, local_tensor, shard_rows

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
    folder: Path, parameters: Sequence[tuple[str, torch.Tensor]]
) -> tuple[int, dict[str, State]]:
    """Return the step count and AdamW's state by parameter, sharded as it is.

    The folder may have been written by another number of ranks.

    Raises:
        CheckpointError: a file is damaged, or has values that AdamW cannot have written.
        ValueError: a parameter is missing or has another shape.
    """
    step_count, steps, unmoved = _read_steps(folder / STEPS)
    rows_of = {}
    for name, parameter in parameters:
        rows = shard_rows(parameter)
        if rows is None:
            rows = slice(0, parameter.shape[0])
        for key in SHARDED:
            rows_of[f"{name}.{key}"] = rows
    found = _find_moments(folder, rows_of)
    states = {}
    for name, parameter in parameters:
        if name in unmoved:
            continue
        moments = {}
        for key in SHARDED:
            moment = found.get(f"{name}.{key}")
            if name not in steps or moment is None:
                raise ValueError(f"{folder}: no optimizer state for {name}: of another model?")
            if moment.shape != parameter.shape:
                raise ValueError(f"{folder}: optimizer state of {name} has another shape")
            with _name_damage(folder):
                local = moment.read(rows_of[f"{name}.{key}"], parameter.dtype)
            moments[key] = like_shard(local.to(parameter.device), parameter)
        step = torch.tensor(steps[name], dtype=torch.float32, device=parameter.device)
        states[name] = {**moments, "step": step}
        check_moments(name, states[name], folder)
    return step_count, states


@dataclass(slots=True)
class _Moment:
    """A moment in the files of several ranks.

    Args:
        shape: of all of it.
        chunks: first row and tensor of those that have rows of this rank.
    """

    shape: torch.Size
    chunks: list[tuple[int, StoredTensor]]

    def read(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return these rows, each of which is in one chunk.

        Raises:
            ValueError: a row is in none, or a file is shorter than its header says.
        """
        read = torch.empty([rows.stop - rows.start, *self.shape[1:]], dtype=dtype)
        begin = rows.start
        for first, stored in sorted(self.chunks, key=lambda chunk: chunk[0]):
            end = min(first + stored.shape[0], rows.stop)
            if first <= begin < end:
                part = slice(begin - first, end - first)
                read[begin - rows.start : end - rows.start] = stored.read(part)
                begin = end
        if begin < rows.stop:
            raise ValueError(f"expected rows {rows.start} to {rows.stop} of a moment, got {begin}")
        return read


def _find_moments(folder: Path, rows_of: Mapping[str, slice]) -> dict[str, _Moment]:
    """Return where moments are stored, by the headers of all files.

    Args:
        rows_of: those of this rank, by moment. Of a thousand files only a few have them.

    Raises:
        CheckpointError: a file is none that `queue_shards` writes.
    """
    found: dict[str, _Moment] = {}
    with _name_damage(folder):
        for file in sorted(folder.glob("*.safetensors")):
            header, _ = read_header(file)
            offsets = json.loads(header[METADATA][SHARDING_INFO])
            for name, stored in list_tensors(file).items():
                first = int(offsets[name][OFFSETS][0])
                end = first + stored.shape[0]
                moment = found.setdefault(name, _Moment(torch.Size(), []))
                if not moment.shape or end > moment.shape[0]:
                    moment.shape = torch.Size([end, *stored.shape[1:]])
                rows = rows_of.get(name)
                if rows is not None and first < rows.stop and end > rows.start:
                    moment.chunks.append((first, stored))
    return found


@contextmanager
def _name_damage(folder: Path) -> Iterator[None]:
    """Raise CheckpointError in place of what is raised about files that cannot be read."""
    try:
        yield
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
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
