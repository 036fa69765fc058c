"""A model's weights in Hugging Face format, written by all ranks: a file each, of some layers.

A layer's full weights are gathered once and kept by the rank that writes them, so that no rank
holds the model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from skyrl_fast.train.parallel.ranks import run_on_all_ranks
from skyrl_fast.train.parallel.sharding import full_weight, names_by_layer, weights_of
from skyrl_fast.train.parallel.traffic import CHECKPOINT

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def save_pretrained(owner: Any, folder: Path) -> None:
    """Write the config and an index of a policy or a critic; queue the weights in `ranks.files`."""
    found = _queue_weights(owner, folder)
    owner.pretrained.save_pretrained(folder, state_dict={})
    (folder / WEIGHTS).unlink(missing_ok=True)  # that of no weights
    index = {
        "metadata": {"total_size": sum(num_bytes for _, _, num_bytes in found)},
        "weight_map": {name: file for name, file, _ in found},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


@run_on_all_ranks
def _queue_weights(owner: Any, folder: Path) -> list[tuple[str, str, int]]:
    """Queue the weights of this rank; return name, file and bytes of those of all ranks."""
    ranks = owner.ranks
    model = owner.pretrained
    # Known on every rank without a message: all have the same model.
    owners = writers(model, ranks.size)
    left_out = getattr(model, "_keys_to_ignore_on_save", None) or ()
    weights = dict(weights_of(model))

    def gather(name: str) -> torch.Tensor:
        return full_weight(weights[name], ranks, CHECKPOINT, owner.idle)

    mine = {}
    for names in names_by_layer(model):
        layer = {}
        for name in names:
            # Without a name, which would hold it while the next one is gathered.
            if owners[name] == ranks.rank and name not in left_out:
                layer[name] = gather(name).to("cpu", copy=True)
            else:
                gather(name)
        if layer:
            # Layer by layer: stored tensors that are parts of a weight are copies of them.
            for name, value in checkpoint_names(model, layer).items():
                mine[name] = value.contiguous()
    file = f"model-{ranks.rank + 1:05d}-of-{ranks.size:05d}.safetensors"

    def write() -> list[Path]:
        if not mine:
            return []
        path = folder / file
        save_file(mine, str(path), metadata={"format": "pt"})
        return [path]

    ranks.files.queue(write)
    written = [(name, file, value.nbytes) for name, value in mine.items()]
    return ranks.gather(written, from_each=True)


def writers(model: Any, size: int) -> dict[str, int]:
    """Return the rank that writes each weight: about as many bytes each, no layer divided."""
    sizes = {name: value.nbytes for name, value in weights_of(model)}
    total = sum(sizes.values())
    found: dict[str, int] = {}
    before = 0
    for names in names_by_layer(model):
        found |= dict.fromkeys(names, before * size // total)
        before += sum(sizes[name] for name in names)
    return found


def checkpoint_names(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Undo transformers 5's conversions on loading, such as fusing a layer's experts."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4: names in the model are those of the checkpoint
        return weights
    return revert_weight_conversion(model, weights)
