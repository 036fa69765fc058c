"""The command `skyrl-fast export RUN OUT --to FORM`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from skyrl_fast.commands.command import as_usage_error

BATCH = "batch"
SKYRL = "skyrl"
SFT = "sft"
MODEL = "model"
ADAPTER = "adapter"

HELP = "write a run's trajectories as training data, or its policy as a model"
DESCRIPTION = (
    "Write the trajectories of a recording or a run as a batch, as SkyRL's generator output, or as "
    "chats for fine-tuning; or the policy of a run's newest checkpoint as a model or an adapter."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        type=Path,
        help="folder of a recording, a run or a checkpoint, also of one of `skyrl-fast tinker`",
    )
    parser.add_argument(
        "out", type=Path, help="file to write, which is replaced; of a model a new folder"
    )
    parser.add_argument(
        "--to",
        choices=(BATCH, SKYRL, SFT, MODEL, ADAPTER),
        required=True,
        help="batch: a StepBatch in a safetensors file; skyrl: SkyRL's generator output as JSON; "
        "sft: JSON lines of messages for `skyrl-fast sft`, of a recording only; model: a Hugging "
        "Face model with a model card, a LoRA adapter merged in; adapter: the adapter, by PEFT",
    )
    parser.add_argument(
        "--policy", metavar="NAME", help="policy to write, of a run of several: lora.policies"
    )
    parser.add_argument("--push", metavar="NAME", help="upload the model to the Hugging Face Hub")
    parser.add_argument(
        "--min-reward", type=float, help="leave out trajectories with a lower reward"
    )


def run(options: argparse.Namespace, *, hub: Any = None) -> int:
    """Write the export, and upload it if that is asked for.

    Args:
        options: parsed arguments.
        hub: huggingface_hub's API; None: an `HfApi`.
    """
    with as_usage_error(ValueError, OSError, ImportError):
        written = _write_output(options, hub)
    sys.stdout.write(f"{written} in {options.out}\n")
    return 0


def _write_output(options: argparse.Namespace, hub: Any) -> str:
    if options.to in (MODEL, ADAPTER):
        return _write_model(options, hub)
    if options.policy is not None:
        raise ValueError(f"--policy: expected --to {MODEL} or {ADAPTER}, got {options.to}")
    if options.push is not None:
        raise ValueError(f"--push: expected --to {MODEL} or {ADAPTER}, got {options.to}")
    from safetensors import SafetensorError

    from skyrl_fast.adapters.generator_output import generator_output_from_trajectories
    from skyrl_fast.batch import batch_from_trajectories
    from skyrl_fast.trajectory_store.recorded import read_recorded, sft_rows

    if options.to == SFT:
        lines = []
        for row in sft_rows(options.run, min_reward=options.min_reward):
            lines.append(json.dumps(row))
        _replace(options.out, "".join(f"{line}\n" for line in lines))
        return f"{len(lines)} conversations"
    trajectories = read_recorded(options.run, min_reward=options.min_reward)
    if not trajectories:
        raise ValueError(f"{options.run}: no trajectories to export")
    if names := sorted({str(step.policy) for t in trajectories for step in t.steps if step.policy}):
        raise ValueError(
            f"{options.run}: expected trajectories of one policy, whose rows are trained together, "
            f"got those of {', '.join(names)}: divide `read_recorded`'s by `Step.policy`"
        )
    if options.to == BATCH:
        batch = batch_from_trajectories(trajectories)
        try:
            batch.save(options.out)
        except SafetensorError as error:
            raise ValueError(f"{options.out}: cannot be written: {error}") from error
    else:
        output = dict(generator_output_from_trajectories(trajectories))
        ids: Any = output["trajectory_ids"]
        output["trajectory_ids"] = [one._asdict() for one in ids]
        _replace(options.out, json.dumps(output, default=_to_list))
    rows = sum(len(t.steps_or_placeholder()) for t in trajectories)
    groups = len({trajectory.uid for trajectory in trajectories})
    if groups == len(trajectories):
        sys.stderr.write(
            "warning: each group has one trajectory, so that rewards have no baseline; open "
            "sessions of one task with the same uid\n"
        )
    return f"{rows} rows of {len(trajectories)} trajectories in {groups} groups"


def _write_model(options: argparse.Namespace, hub: Any) -> str:
    from skyrl_fast.tinker.checkpoints import export_saved, is_saved_adapter
    from skyrl_fast.train.checkpoint.model_export import export_model, push_model

    if options.min_reward is not None:
        raise ValueError(f"--min-reward: expected trajectories to export, got --to {options.to}")
    if is_saved_adapter(options.run):
        checkpoint = export_saved(options.run, options.out, merged=options.to == MODEL)
    else:
        checkpoint = export_model(
            options.run, options.out, adapter=options.to == ADAPTER, name=options.policy
        )
    if options.push is None:
        pushed = ""
    else:
        address = push_model(options.out, options.push, hub)
        pushed = f", uploaded to {address}"
    return f"the {options.to} of {checkpoint}{pushed}"


def _to_list(array: Any) -> Any:
    return array.tolist()


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
