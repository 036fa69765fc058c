"""What needs the package bfcl-eval, in a process of its own that sees its folder of packages.

    python examples/bfcl/package.py rows CATEGORY    print the leaderboard's questions, a line each
    python examples/bfcl/package.py check               answer each line of the standard input

`check` reads lines `{"category", "functions", "answers", "calls"}` and writes lines
`{"valid", "error"}`, by the leaderboard's own checker.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

MODEL = "model"  # in the leaderboard's table of models


def _replace_table_of_models() -> None:
    """Let the checker find one model, in place of the clients of forty providers.

    The checker reads only one value of that table: whether a model's names have underscores where
    those of the functions have dots.
    """
    table = ModuleType("bfcl_eval.constants.model_config")
    table.MODEL_CONFIG_MAPPING = {MODEL: SimpleNamespace(underscore_to_dot=True)}  # type: ignore[attr-defined]
    sys.modules[table.__name__] = table


def rows(category: str) -> Iterator[dict[str, Any]]:
    """Yield the questions of a category, with their functions as tools of OpenAI's API."""
    from bfcl_eval.constants.enums import ModelStyle
    from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI
    from bfcl_eval.model_handler.utils import convert_to_tool
    from bfcl_eval.utils import load_dataset_entry, load_ground_truth_entry

    questions = load_dataset_entry(category)
    answers = load_ground_truth_entry(category)
    for question, answer in zip(questions, answers, strict=True):
        if question["id"] != answer["id"]:
            raise ValueError(f"{category}: {question['id']} has the answer of {answer['id']}")
        (messages,) = question["question"]
        functions = question["function"]
        style = ModelStyle.OPENAI_COMPLETIONS
        yield {
            "id": question["id"],
            "category": category,
            "prompt": messages,
            "tools": convert_to_tool(functions, GORILLA_TO_OPENAPI, style),
            "functions": functions,
            "answers": answer["ground_truth"],
        }


def verdict(
    category: str,
    functions: Sequence[dict[str, Any]],
    answers: Sequence[dict[str, Any]],
    calls: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Return what the leaderboard's checker says of calls.

    Args:
        category: of the question.
        functions: of the question, in the leaderboard's form.
        answers: right calls, each value a list of those that count as right.
        calls: of the model: `{name: arguments}`.
    """
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

    try:
        said = ast_checker(functions, calls, answers, Language.PYTHON, category, MODEL)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # It takes some values apart as what they should be, and raises where they are not.
        return {"valid": False, "error": f"{type(error).__name__}: {error}"}
    return {"valid": said["valid"], "error": str(said["error"])}


def main(arguments: Sequence[str]) -> None:
    """Run one of the two commands."""
    _replace_table_of_models()
    command, *more = arguments
    if command == "rows":
        for row in rows(*more):
            print(json.dumps(row))
    elif command == "check":
        for line in sys.stdin:
            print(json.dumps(verdict(**json.loads(line))), flush=True)
    else:
        sys.exit(f"expected rows or check, got {command!r}")


if __name__ == "__main__":
    main(sys.argv[1:])
