"""SkyRL's conversion and padding of a batch: its own functions where installed, and restated.

The functions are loaded directly from their files, because their packages import Ray and more.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch


def _skyrl_module(path: str) -> ModuleType | None:
    package = importlib.util.find_spec("skyrl")
    if package is None or not package.submodule_search_locations:
        return None
    file = Path(next(iter(package.submodule_search_locations))) / path
    spec = importlib.util.spec_from_file_location(f"skyrl_{file.stem}", file)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError:
        return None
    return module


def skyrl_convert() -> tuple[Callable[..., Any], str]:
    """Return SkyRL's convert and "skyrl", or the same work restated and "restated"."""
    module = _skyrl_module("train/dataset/preprocess.py")
    if module is None:
        return restated_convert, "restated"
    return module.convert_prompts_responses_to_batch_tensors, "skyrl"


def skyrl_pad() -> tuple[Callable[[dict[str, Any], dict[str, Any], int], Any], str]:
    """Return a pad of (tensors, metadata, pad_size) by SkyRL and "skyrl", or restated."""
    module = _skyrl_module("backends/skyrl_train/training_batch.py")
    if module is None:
        return restated_pad, "restated"

    def pad(tensors: dict[str, Any], metadata: dict[str, Any], pad_size: int) -> Any:
        batch = module.TrainingInputBatch(tensors)
        batch.metadata = metadata
        return module.pad_training_input_batch(batch, pad_size)

    return pad, "skyrl"


def restated_convert(
    tokenizer: Any,
    prompts: list[list[int]],
    responses: list[list[int]],
    rewards: list[list[float]],
    loss_masks: list[list[int]],
    logprobs: list[list[float]] | None = None,
) -> tuple[Any, ...]:
    """Write every row's slices with NumPy: several times faster than SkyRL's nested lists."""
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    width, columns = max(lengths), max(map(len, responses))
    shape = (len(prompts), width)
    sequences = np.full(shape, tokenizer.pad_token_id, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    response_mask = np.zeros((len(prompts), columns), dtype=np.int64)
    for i, (prompt, response, length) in enumerate(zip(prompts, responses, lengths, strict=True)):
        sequences[i, width - length : width - len(response)] = prompt
        sequences[i, width - len(response) :] = response
        attention_mask[i, width - length :] = 1
        response_mask[i, columns - len(response) :] = 1

    def right_aligned(rows: list[list[float]]) -> torch.Tensor:
        out = np.zeros((len(rows), columns), dtype=np.float32)
        for i, row in enumerate(rows):
            out[i, columns - len(row) :] = row
        return torch.from_numpy(out)

    return (
        torch.from_numpy(sequences),
        torch.from_numpy(attention_mask),
        torch.from_numpy(response_mask),
        right_aligned(rewards),
        right_aligned(loss_masks),
        None if logprobs is None else right_aligned(logprobs),
        None,
    )


def restated_pad(tensors: dict[str, Any], metadata: dict[str, Any], pad_size: int) -> Any:
    """Concatenate each tensor with copies of its row 0, zeros for the loss mask."""
    padded = {}
    for name, tensor in tensors.items():
        rows = tensor[[0] * pad_size].clone()
        padded[name] = torch.cat([tensor, rows.zero_() if name == "loss_mask" else rows])
    uids = metadata["uids"] + [f"pad{i}" for i in range(pad_size)]
    return padded, {"uids": uids, "is_last_step": metadata["is_last_step"] + [True] * pad_size}
