"""Write docs/reference/trainer_api.md and docs/reference/commands.md, from docstrings and the
command line's help.

python -m scripts.python_api_page
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import skyrl_fast.train
from skyrl_fast.cli import command_parser

DOCS = Path(__file__).resolve().parent.parent / "docs/reference"
HEAD = """# Python API of the trainer

Import these names from `skyrl_fast`; `skyrl_fast.train` has them, too. They are explained in the
[first agent](../guide/first_agent.md), [environments](../guide/environments.md) and
[custom losses and estimators](../guide/custom_algorithms.md), those of the last section in
[examples/own_loop.py](../../examples/own_loop.py); the ops and batches of `skyrl_fast`
are in the [API](ops_api.md). Generated from the docstrings by `python -m scripts.python_api_page`.

```python
import skyrl_fast
from skyrl_fast import Callback, Env, EnvStep, LossInputs, register_policy_loss


class Guess(Env):
    def __init__(self, row):
        self.answer = row["answer"]

    def step(self, action):
        right = self.answer in action
        return EnvStep(float(right), done=right, observations="" if right else "No. Guess again.")


class UntilSolved(Callback):
    def on_eval(self, step, metrics):
        return metrics["eval/all/avg_score"] >= 0.95


@register_policy_loss("ratio", zero_where_advantage_is_zero=True)
def ratio(inputs: LossInputs):
    return -inputs.advantages * (inputs.logprobs - inputs.old_logprobs).exp()


if __name__ == "__main__":
    result = skyrl_fast.train_agent(
        {"trainer.policy.model.path": "Qwen/Qwen2.5-0.5B-Instruct", "trainer.run_path": "guess"},
        env=Guess,
        prompts=[{"prompt": "Guess a colour.", "answer": "red"}] * 64,
        loss=ratio,
        callbacks=[UntilSolved()],
    )
    print(result.step, result.checkpoint)
```
"""
COMMANDS_HEAD = """# Commands

The commands of `skyrl-fast`, with their options. Generated from their help by
`python -m scripts.python_api_page`.
"""
# What a user needs, in this order; the test compares it with `skyrl_fast.train.__all__`.
SECTIONS = {
    "Runs": ("train_agent", "sft", "TrainResult", "SetupError"),
    "Evaluation": ("evaluate", "Evaluation"),
    "Environments": ("Env", "EnvStep", "Action"),
    "Agents": ("AgentTask",),
    "Losses and estimators": (
        *("register_policy_loss", "LossInputs", "LossOutput"),
        *("register_advantage_estimator", "EstimatorInputs", "EstimatorOutput"),
    ),
    "Callbacks": ("Callback", "CallbackError"),
    "Loggers": ("Logger", "RunInfo"),
    "A loop of one's own": (
        "load_config",
        "Config",
        "load_prompts",
        "Prompt",
        "load_tokenizer",
        "start_rollouts",
        "Rollouts",
        "compute_advantages",
        "load_policy",
        "Policy",
        "MicroBatch",
        "response_positions",
        "Optimizer",
    ),
}
TABLE = ("| argument | description |", "|---|---|")
SECTION = re.compile(r"^(Args|Returns|Raises|Source|Example):\n", flags=re.MULTILINE)


def pages() -> dict[Path, str]:
    """Return the Markdown of each page."""
    names = [
        f"## {title}\n\n" + "\n".join(entry(name) for name in names)
        for title, names in SECTIONS.items()
    ]
    commands = [command(name, parser) for name, parser in subparsers().items()]
    return {
        DOCS / "trainer_api.md": "\n".join([HEAD, *names]),
        DOCS / "commands.md": "\n".join([COMMANDS_HEAD, *commands]),
    }


def entry(name: str) -> str:
    """Return the section of a public name: signature, text, arguments, errors, methods."""
    value = getattr(skyrl_fast.train, name)
    parts = [f"### {name}\n", *described(value)]
    if not inspect.isclass(value):
        parts.insert(1, f"`{name}({', '.join(parameters(value))})`\n")
    else:
        parts += list(methods(value))
    return "\n".join(parts)


def parameters(function: Any) -> Iterator[str]:
    """Yield names and defaults, without types; `*` before those by keyword only."""
    keyword_only = False
    for item in inspect.signature(function).parameters.values():
        if item.kind is item.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            yield "*"
        yield item.name if item.default is item.empty else f"{item.name}={item.default!r}"


def described(value: Any) -> Iterator[str]:
    """Yield the Markdown of a docstring in Google's style, without its example."""
    text, *rest = SECTION.split(inspect.getdoc(value) or "")
    yield prose(text)
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        items = named(body)
        if title == "Args":
            rows = [f"| `{name}` | {about} |" for name, about in items]
            yield "\n".join([*TABLE, *rows]) + "\n"
        elif title == "Raises":
            yield "\n".join(f"- raises `{name}`: {about}" for name, about in items) + "\n"
        elif title == "Returns":
            yield "Returns: " + prose(inspect.cleandoc(body))


def prose(text: str) -> str:
    """Return paragraphs of one line each."""
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n")) + "\n"


def named(body: str) -> list[tuple[str, str]]:
    """Return names and descriptions of a docstring's `name: description` entries."""
    lines = inspect.cleandoc("x\n" + body).splitlines()[1:]
    entries: list[list[str]] = []
    for line in lines:
        if line.startswith(" ") or not line.strip():
            entries[-1].append(line.strip())
        else:
            entries.append([line])
    found = [" ".join(filter(None, entry)).partition(": ") for entry in entries]
    return [(name.replace(", ", "`, `"), about.replace("|", "\\|")) for name, _, about in found]


def methods(kind: type) -> Iterator[str]:
    """Yield a list of the public methods that the class and the package's bases of it define."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("skyrl_fast"):
            found |= vars(base)
    for name, value in found.items():
        if inspect.isfunction(value) and not name.startswith("_"):
            given = ", ".join(list(parameters(value))[1:])
            first = prose(SECTION.split(inspect.getdoc(value) or "")[0])
            yield f"- `{name}({given})`: {first}"


def subparsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command."""
    (action,) = (a for a in command_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def command(name: str, parser: argparse.ArgumentParser) -> str:
    """Return the section of a command."""
    rows = [
        f"| `{', '.join(item.option_strings) or item.metavar or item.dest}` | {item.help} |"
        for item in parser._actions
        if item.dest != "help" and item.help != argparse.SUPPRESS
    ]
    about = f"{parser.description or ''}".strip() or "Report what is built, found and missing."
    return "\n".join([f"## skyrl-fast {name}\n", about + "\n", *TABLE, *rows, ""])


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
