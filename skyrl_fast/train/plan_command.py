"""The command `skyrl-fast plan`: a run's memory per GPU, without a GPU and without the weights."""

from __future__ import annotations

import argparse
import re
import sys

from skyrl_fast.printable import MAX_FAILURE, printable

UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6}
DEFAULT_MEMORY = "79GiB"  # what torch reports of an "80 GB" A100 or H100
DOES_NOT_FIT, USAGE = 1, 2  # exit codes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("config", help="the trainer's YAML file")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings that override the file, or YAML files with such",
    )
    parser.add_argument(
        "--device-memory",
        type=num_bytes,
        help=f"memory of each GPU, such as 80GiB; default: this machine's, else {DEFAULT_MEMORY}",
    )
    parser.add_argument(
        "--num-gpus",
        type=int,
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
        raise argparse.ArgumentTypeError(
            f"wanted a number and a unit of {', '.join(UNITS)}, got {text!r}"
        )
    return round(float(match[1]) * UNITS[match[2]])


def plan(options: argparse.Namespace) -> int:
    """Print the plan; return 0 if the run fits, 1 if not, 2 if the settings are wrong."""
    try:
        import torch

        from skyrl_fast.config.loading import load_config
        from skyrl_fast.train.memory_plan import gpu_memory, plan_memory
    except ImportError as error:
        return _complain(f"a package is missing: {error}; pip install 'skyrl-fast[train]'")
    try:
        config = load_config(options.config, options.overrides)
        found = gpu_memory(config)
        capacity = options.device_memory or found or num_bytes(DEFAULT_MEMORY)
        num_gpus = options.num_gpus or torch.cuda.device_count()
        result = plan_memory(config, capacity=capacity, num_gpus=num_gpus)
    except ValueError as error:  # also a ConfigError
        return _complain(str(error))
    sys.stdout.write(f"{result}\n")
    return 0 if result.fits else DOES_NOT_FIT


def _complain(message: str) -> int:
    sys.stderr.write(f"skyrl-fast: {printable(message, MAX_FAILURE)}\n")
    return USAGE
