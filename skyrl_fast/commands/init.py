"""The command `skyrl-fast init FOLDER`."""

from __future__ import annotations

import argparse
import json
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from os.path import expanduser
from pathlib import Path
from random import Random

from skyrl_fast.commands.command import UsageError, as_usage_error, needs_extra
from skyrl_fast.commands.quickstart import find_examples

HELP = "create a project: an environment, prompts, settings, tests"
DESCRIPTION = "Write a small project that trains at once, as the start of your own."
TEMPLATE = Path(__file__).with_name("project")
PROMPT = "guess my number from 1 to 9"
ANSWER_FORM = "Answer with one number only."  # a tiny model answers with numbers anyway
HINTS = "higher lower"
SECRETS: Sequence[int] = (7, 2, 9, 4, 1, 6, 3, 8, 5)  # secrets of the rows, by turns
# 7 is soon found, and is not all that there is to learn.
TINY_SECRETS: Sequence[int] = (7, 2, 7, 9, 7, 4, 7, 5)
NUM_ROWS = {"train": 64, "eval": 8}
NUM_GAMES, NUM_STEPS = 1000, 100  # games and steps of the tiny model's warm start
TINY_PATH = "path: model"  # in the template's config.yaml
# Lines of it, and those for a pretrained model, which may think and writes sentences.
PRETRAINED = {
    "lr: 1.0e-3  # for a tiny model; 1.0e-5 for a pretrained one": (
        "lr: 1.0e-5  # up to a billion parameters; 1.0e-6 for a larger model"
    ),
    "max_input_length: 128": "max_input_length: 1024",
    "  max_turns: 4\n": (
        "  max_turns: 4\n"
        "  chat_template_kwargs: {enable_thinking: false}  # templates without it ignore it\n"
    ),
    "max_generate_length: 4  # tokens of a turn": (
        "max_generate_length: 128  # tokens of a turn; 2048 for a model that always thinks"
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="new folder")
    parser.add_argument(
        "--model", help="pretrained model, a folder or a hub name; default: a tiny one is made"
    )


def run(options: argparse.Namespace) -> int:
    folder = options.folder
    if folder.exists():
        raise UsageError(f"init: expected a folder that does not exist, got {folder}")
    with as_usage_error(OSError, ValueError):
        if options.model is not None:
            from skyrl_fast.config.model_folder import find_local_model

            find_local_model(options.model, setting="init: --model")
        create_project(folder, options.model)
    sys.stdout.write(f"next:\n  cd {shlex.quote(str(folder))}\n  skyrl-fast train config.yaml\n")
    return 0


def create_project(
    folder: Path,
    model: str | None,
    *,
    write: Callable[[Path, str | None], None] | None = None,
) -> None:
    """Create the project, complete or not at all.

    Args:
        folder: new.
        model: pretrained, a folder or a hub name; None: make one.
        write: fills a folder; default: `write_project`.
    """
    find_examples()
    from examples.tiny_model.recipe import make_once

    fill = write_project if write is None else write
    make_once(folder, lambda path: fill(path, model))


def write_project(folder: Path, model: str | None) -> None:
    """Write the project; without a model, make one."""
    if model is None:
        with needs_extra("train"):
            from torch import set_num_threads

            from examples.tiny_model.model import make_tokenizer
            from examples.tiny_model.warm_start import encode_chats, warm_start
    shutil.copytree(TEMPLATE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    prompt = PROMPT
    secrets = TINY_SECRETS
    if model is not None:
        prompt = f"{PROMPT.capitalize()}. {ANSWER_FORM}"
        secrets = SECRETS
    for name, count in NUM_ROWS.items():
        file = folder / f"{name}.jsonl"
        file.write_text(rows_text(prompt, secrets, count), encoding="utf-8")
    if model is None:
        tokenizer = make_tokenizer([PROMPT, HINTS], max_length=256)
        rows = encode_chats(tokenizer, list(random_games(folder / "environment.py")))
        set_num_threads(1)  # another one would be waited for longer than it computes
        warm_start(tokenizer, rows, folder / "model", num_steps=NUM_STEPS)
    else:
        config = folder / "config.yaml"
        local = Path(expanduser(model))
        path = str(local.absolute()) if local.exists() else model  # training starts in the folder
        text = config.read_text(encoding="utf-8")
        for line, pretrained in PRETRAINED.items():
            text = text.replace(line, pretrained)
        quoted = json.dumps(path, ensure_ascii=False)
        config.write_text(text.replace(TINY_PATH, f"path: {quoted}"), encoding="utf-8")


def rows_text(prompt: str, secrets: Sequence[int], count: int) -> str:
    """Return the lines of a file of prompts, one for each game, with the secrets by turns."""
    text = ""
    for secret in islice(cycle(secrets), count):
        row = {"prompt": prompt, "secret": secret}
        text += json.dumps(row) + "\n"
    return text


def random_games(environment: Path) -> Iterator[list[dict[str, str]]]:
    """Yield chats of a player who knows the rules, and guesses without thinking."""
    game_class = runpy.run_path(str(environment))["Guess"]
    random = Random(0)
    for _ in range(NUM_GAMES):
        game = game_class({"secret": random.randint(1, 9)})
        done = False
        text = PROMPT
        chat = []
        while not done:
            guess = str(random.randint(1, 9))
            chat += [{"role": "user", "content": text}, {"role": "assistant", "content": guess}]
            step = game.step(guess)
            done = step.done
            text = step.observations
        yield chat
