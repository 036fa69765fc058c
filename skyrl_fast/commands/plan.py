"""The command `skyrl-fast plan`: a run's memory, without a GPU and without the weights."""

from __future__ import annotations

import argparse
import re
import shlex
import sys

from skyrl_fast.commands.command import (
    add_config_arguments,
    as_usage_error,
    count,
    load_settings,
    needs_extra,
)

UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6}
DEFAULT_MEMORY = "79GiB"  # what torch reports of an "80 GB" A100 or H100
DOES_NOT_FIT = 1  # exit code
NO_GPU = (
    "planning: this machine has no GPU, so it is for a run in its main memory; "
    f"--device-memory {DEFAULT_MEMORY} plans for a GPU\n"
)

HELP = "show whether a run fits into the memory of its GPUs"
DESCRIPTION = (
    "Add up the memory of a run, per GPU, from its settings and its models' config.json; needs "
    "neither GPU nor weights. With trainer.device=cpu, and on a machine without a GPU where none "
    "is described: the main memory of a run on the processor. Where it does not fit, name settings "
    "with which it would: for all weights, by LoRA, with shorter rows. Exit code 1: it does not "
    "fit."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument(
        "--device-memory",
        type=num_bytes,
        help="memory of each GPU, or with trainer.device=cpu main memory, such as 80GiB; default: "
        f"this machine's; of GPUs that it does not have {DEFAULT_MEMORY}",
    )
    parser.add_argument(
        "--num-gpus",
        type=count,
        help="GPUs of the machine; default: this machine's, at least those of the trainer",
    )


def num_bytes(text: str) -> int:
    """Return the bytes of a size such as "80GiB".

    Example:
        >>> num_bytes("1.5GiB")
        1610612736
    """
    match = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})", text)
    if match is None:
        size = 0
    else:
        size = round(float(match[1]) * UNITS[match[2]])
    if not size:
        raise argparse.ArgumentTypeError(
            f"expected a number above 0 and a unit of {', '.join(UNITS)}, got {text!r}"
        )
    return size


def run(options: argparse.Namespace) -> int:
    config = load_settings(options.config, options.overrides, has_prompts=True)
    from skyrl_fast.config.files import check_local_model

    check_local_model(config)
    with needs_extra("train"):
        import torch

        from skyrl_fast.ops._backend import main_memory
        from skyrl_fast.train.memory.plan import (
            gpu_memory,
            memory_in_use,
            plan_with_remedies,
            settle_ranks,
        )
    with as_usage_error(ValueError):
        describes_gpus = options.device_memory is not None or options.num_gpus is not None
        wants_gpus = describes_gpus or config.trainer.placement.num_ranks > 1
        if config.trainer.device == "auto" and not wants_gpus and not torch.cuda.device_count():
            config.trainer.device = "cpu"
            sys.stderr.write(NO_GPU)
        found = main_memory() if config.trainer.device == "cpu" else gpu_memory(config)
        capacity = options.device_memory or found or num_bytes(DEFAULT_MEMORY)
        num_gpus = options.num_gpus or torch.cuda.device_count() or None
        on_this_gpu = options.device_memory is None and config.trainer.device != "cpu"
        sys.stderr.write("planning: measuring passes of the model on tensors without memory ...\n")
        settle_ranks(config, capacity=capacity, num_gpus=num_gpus or 1)
        in_use = memory_in_use(config) if on_this_gpu else 0
        result = plan_with_remedies(config, capacity=capacity, in_use=in_use, num_gpus=num_gpus)
    sys.stdout.write(f"{result}\n")
    proposals = [] if result.remedies is None else result.remedies.proposals
    if proposals:
        changed = proposals[0].split()
        keys = {word.partition("=")[0] for word in changed}
        kept = [word for word in options.overrides if word.partition("=")[0] not in keys]
        words = [options.config, *kept, *changed]
        sys.stdout.write(f"for example: skyrl-fast train {shlex.join(words)}\n")
    return 0 if result.fits else DOES_NOT_FIT
