"""The command `skyrl-fast init FOLDER`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from skyrl_fast.commands.command import UsageError, needs_extra
from skyrl_fast.commands.quickstart import find_examples

HELP = "create a project: an environment, prompts, settings, tests"
DESCRIPTION = "Write a small project that trains at once, as the start of your own."
TEMPLATE = Path(__file__).with_name("project")
SECRETS = range(1, 10)
PROMPT = "guess a number from 1 to 9"
HINTS = "higher lower"
TINY_PATH = "path: model"  # in the template's config.yaml


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="new folder")
    parser.add_argument(
        "--model", help="pretrained model, a folder or a hub name; default: a tiny random one"
    )


def run(options: argparse.Namespace) -> int:
    """Write the project, and print what to do with it."""
    folder = options.folder
    if folder.exists():
        raise UsageError(f"init: expected a folder that does not exist, got {folder}")
    if options.model is None:
        find_examples()
        with needs_extra("train"):
            from examples.tiny_model.model import make_model, make_tokenizer
    shutil.copytree(TEMPLATE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, repeats in (("train", 10), ("eval", 2)):
        rows = [{"prompt": PROMPT, "secret": secret} for secret in SECRETS] * repeats
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    if options.model is None:
        tokenizer = make_tokenizer([PROMPT, HINTS], max_length=256)
        make_model(tokenizer).save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    else:
        config = folder / "config.yaml"
        text = config.read_text(encoding="utf-8").replace(
            TINY_PATH, f"path: {json.dumps(options.model)}"
        )
        config.write_text(text.replace("lr: 1.0e-3", "lr: 1.0e-6"), encoding="utf-8")
    sys.stdout.write(f"created {folder}; next:\n  cd {folder}\n  skyrl-fast train config.yaml\n")
    return 0
