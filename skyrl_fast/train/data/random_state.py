"""Random states of torch, NumPy and Python in checkpoints, without pickle."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from skyrl_fast.train.checkpoint.local import damage_error


def save_random_state(path: Path) -> dict[str, Any]:
    """Write torch's states to `path` and return the others as JSON values."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    save_file(states, str(path))
    # As plain numbers: nothing in a checkpoint is pickled.
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), position, has_gauss, cached],
    }


def load_random_state(path: Path, state: dict[str, Any]) -> None:
    """Restore all states from `save_random_state`; CheckpointError if the file is damaged."""
    try:
        states = load_file(str(path))
        torch.set_rng_state(states["torch"])
        if torch.cuda.is_available():
            devices = [name for name in sorted(states) if name.startswith("cuda")]
            # A resumed run may have fewer GPUs, or more.
            for device in range(min(len(devices), torch.cuda.device_count())):
                torch.cuda.set_rng_state(states[f"cuda{device}"], device)
    except (LookupError, OSError, RuntimeError, SafetensorError, TypeError) as error:
        raise damage_error(path, f"no random states: {type(error).__name__}: {error}") from error
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    # NumPy would read beyond its array at a wrong position: `check_state` has looked at it.
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
