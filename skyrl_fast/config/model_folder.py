"""The folder of a model, local, in the hub's cache or downloaded, and the class that loads it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os.path import expanduser
from pathlib import Path
from typing import Any

from skyrl_fast.system.location import described_path

POLICY = "trainer.policy.model.path"
HUB_SECONDS = 10.0  # for the hub to answer at all
_ADAPTER_CONFIG = "adapter_config.json"
_METADATA = ("*.json", "*.txt", "*.model", "*.jinja")  # configuration and tokenizer


class ModelHub:
    """The Hugging Face hub, and its cache on this machine.

    Args:
        cache: folder of the cache; None: the user's.
    """

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache

    def find_cached(self, name: str) -> Path | None:
        """Return the folder of a model in the cache; None: it is not there."""
        from huggingface_hub import try_to_load_from_cache

        try:
            found = try_to_load_from_cache(name, "config.json", cache_dir=self._cache)
        except ValueError:  # no hub name
            return None
        if isinstance(found, str):
            return Path(found).parent
        return None

    def check(self, name: str) -> None:
        """Raise the hub's error unless it has the model: one request, no retries."""
        from huggingface_hub import HfApi

        HfApi().model_info(name, timeout=HUB_SECONDS)

    def download(self, name: str, patterns: Sequence[str]) -> Path:
        """Download files of the model's top folder into the cache; return its folder there."""
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            name,
            cache_dir=self._cache,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"],
        )
        return Path(folder)


HUB = ModelHub()


def model_folder(
    path: str, *, setting: str = POLICY, with_weights: bool = True, hub: ModelHub = HUB
) -> Path:
    """Return the folder of a model; one of the hub is downloaded unless the cache has it.

    Args:
        path: a folder, or a hub name such as org/model.
        setting: the setting of the path, for messages.
        with_weights: whether the folder must have the weights; else only config and tokenizer.
        hub: where models are that are no folder.

    Raises:
        ValueError: there is no such folder, it has no config.json, or the hub does not have it or
            cannot be reached; one line.
    """
    folder = find_local_model(path, setting=setting)
    if folder is not None:
        return folder
    cached = hub.find_cached(path)
    if cached is not None and (_has_weights(cached) or not with_weights):
        return cached
    return _download(hub, path, setting, with_weights)


def find_local_model(path: str, *, setting: str = POLICY) -> Path | None:
    """Return the folder of a local model, or None for a name on the hub.

    Raises:
        ValueError: neither; one line.
    """
    folder = Path(expanduser(path))  # unlike Path's, no error for an unknown user
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            what = _describe_adapter(folder) or "no config.json"
            raise ValueError(f"{setting}: expected the folder of a model, got {path}: {what}")
        return folder
    if "://" in path:
        raise ValueError(f"{setting}: expected a folder or a name on the hub, got the URL {path}")
    if "/" not in path or path.startswith((".", "/", "~")):
        raise ValueError(f"{setting}: model folder not found: {described_path(path)}")
    return None


def find_auto_class(config: Any) -> Any:
    """Return transformers' auto class of the model with a head that a config describes.

    It is the one of the class that the checkpoint names. The types of some vision-language models
    have a causal LM, too, which reads only a part of their weights.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    classes = {
        auto: auto._model_mapping.get(type(config), None)
        for auto in (AutoModelForCausalLM, AutoModelForImageTextToText)
    }
    exists = [auto for auto, model in classes.items() if model is not None]
    named = [auto for auto in exists if classes[auto].__name__ in (config.architectures or ())]
    return [*named, *exists, AutoModelForCausalLM][0]


def _describe_adapter(folder: Path) -> str:
    """Return how to use a folder of LoRA adapters as PEFT writes it; "" for another folder."""
    # Those of several policies are in folders of their own.
    configs = [*folder.glob(_ADAPTER_CONFIG), *folder.glob(f"*/{_ADAPTER_CONFIG}")]
    if not configs:
        return ""
    rank = json.loads(configs[0].read_bytes()).get("r")
    return (
        f"a LoRA adapter; set trainer.policy.model.lora.rank={rank} to resume its run, or "
        "trainer.policy.model.lora.path to this folder, next to the path of its base model"
    )


def _download(hub: ModelHub, name: str, setting: str, with_weights: bool) -> Path:
    weights = ("*.safetensors",) if with_weights else ()
    try:
        with _without_retry_messages():
            hub.check(name)
            return hub.download(name, [*_METADATA, *weights])
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{setting}: {name} is no folder (in {Path.cwd()}), is not in the cache of the Hugging "
            f"Face hub, and cannot be downloaded ({type(error).__name__}: {reason}): check the "
            "name, the network and HF_TOKEN, or give the folder of a model"
        ) from error


def _has_weights(folder: Path) -> bool:
    """Return whether all files of the weights are there: a download may have been interrupted."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return (folder / "model.safetensors").is_file()
    names = set(json.loads(index.read_bytes())["weight_map"].values())
    return all((folder / name).is_file() for name in names)


@contextmanager
def _without_retry_messages() -> Iterator[None]:
    """Silence the hub's two lines per failed request: the error that it raises says the same."""
    log = logging.getLogger("huggingface_hub")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)
