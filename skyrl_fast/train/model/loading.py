"""Load a model for training: its weights, tokenizer and processor, with recomputed activations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from skyrl_fast.config.model_folder import POLICY, find_auto_class, model_folder
from skyrl_fast.config.settings import TrainerConfig
from skyrl_fast.train.model.lm_head import backbone, is_vision_language
from skyrl_fast.train.model.lora import CONFIG as ADAPTER_CONFIG
from skyrl_fast.train.model.lora import SETTING
from skyrl_fast.train.parallel.ranks import SINGLE_RANK, Ranks
from skyrl_fast.train.parallel.stored_weights import load_unread, take_part

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
    "chat_template.jinja",
)


def load_model(
    path: str,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    with_head: bool = True,
    setting: str = POLICY,
    ranks: Ranks = SINGLE_RANK,
    unread: bool = False,
) -> Any:
    """Return the causal LM of a local folder or hub name, or the model that it is a part of.

    Args:
        with_head: False: return only the backbone.
        setting: the setting of the path, for messages.
        ranks: that share the model. With several its parameters are read when it is sharded, each
            rank its rows, unless it has to be read as a whole.
        unread: leave parameters on the meta device with one rank, too, for `read_weights`.

    Raises:
        ValueError: there is no usable model; the message says what was tried.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModel

    folder = str(model_folder(path, setting=setting))
    if (Path(folder) / ADAPTER_CONFIG).is_file():  # transformers would add it
        raise ValueError(
            f"{setting}: expected a model alone, got {path}, which has an adapter, too "
            f"({ADAPTER_CONFIG}): a run starts from an adapter by {SETTING}.path"
        )
    trust = {"trust_remote_code": False}  # by default transformers asks on the terminal
    model: Any = None
    try:
        config = AutoConfig.from_pretrained(folder, **trust)
        auto = find_auto_class(config) if with_head else AutoModel
        if ranks.size > 1 or unread:
            model = load_unread(auto, Path(folder), config, device, ranks, dtype=dtype, **trust)
        is_unread = model is not None
        if not is_unread:
            model = auto.from_pretrained(folder, config=config, dtype=dtype, **trust)
    except SafetensorError as error:
        raise ValueError(
            f"{setting}: {path} cannot be loaded: {_damaged_files(Path(folder)) or error}"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{setting}: {path} cannot be loaded: {error}") from error
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(f"{setting}: expected weights of 16 or 32 bits, got those of {path}")
    if not with_head:
        model = take_part(model, backbone(model))
    if gradient_checkpointing:
        checkpoint_gradients(model)
        # transformers recomputes layers in training mode only.
        remove_dropout(model.train())
    return model if is_unread else model.to(device)


def _damaged_files(folder: Path) -> str:
    """Return which files of weights cannot be opened, such as those of an interrupted copy."""
    from safetensors import SafetensorError, safe_open

    damaged = []
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            damaged.append(f"{file.name}: {error}")
    return "; ".join(damaged)


def read_processor_files(model: Any) -> dict[str, bytes]:
    """Return the files of a vision-language model's processor by name, of the folder it is from."""
    if not is_vision_language(model):
        return {}
    # Read now: the folder may be a checkpoint that is deleted during the run. They are small.
    files = (Path(model.name_or_path) / name for name in PROCESSOR_FILES)
    return {file.name: file.read_bytes() for file in files if file.is_file()}


def load_tokenizer(path: str) -> Any:
    """Return the tokenizer of a model.

    Args:
        path: folder of the model, or its name on the hub.

    Raises:
        ValueError: there is none.
    """
    from transformers import AutoTokenizer

    folder = model_folder(path, with_weights=False)
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{POLICY}: no tokenizer in {path}: {error}") from error


def hide_progress_bars() -> None:
    from transformers.utils import logging as transformers_logging

    # Those of loading and saving would disturb the run's own display.
    transformers_logging.disable_progress_bar()


def recomputes_activations(trainer: TrainerConfig, device: torch.device) -> bool:
    """Return whether the layers of trained models are checkpointed: by default on a GPU."""
    chosen = trainer.gradient_checkpointing
    if chosen is None:
        return device.type == "cuda"
    return chosen


def checkpoint_gradients(model: Any, **options: Any) -> None:
    """Recompute the layers' activations in the backward pass; options are `checkpoint`'s."""
    renamed = getattr(model, "activation_checkpointing_enable", None)  # in newer transformers
    enable = renamed or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, **options})


def checkpoints_gradients(model: Any) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def remove_dropout(model: Any) -> None:
    """Remove all that is random in training mode: checkpointing needs it, the sampler has none."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            # Models have numbers of many names: `activation_dropout`, `layerdrop`.
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)
            # Phi-3.5-MoE reads its jitter without training, too: as a threshold of its experts.
            if isinstance(value, float) and "jitter" in name:
                module.training = False
