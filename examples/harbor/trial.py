"""Run one trial of Harbor: a command for `agent.command`, with `agent.reward_file=reward.json`.

    trial.py HARBOR CONFIG

HARBOR is Harbor's program, in an environment of its own. CONFIG is a trial's configuration in JSON;
in it ${OPENAI_BASE_URL}, ${OPENAI_API_KEY}, ${OPENAI_MODEL} and their like for Anthropic are
replaced. The task is the folder in the row's column `task`.

This file needs Python alone. It writes no reward if the trial has none, and says why.
"""

from __future__ import annotations

import json
import os
import string
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REWARD = "reward"  # the key of Harbor's rewards that is trained, if there are several
NAME = "trial"


def main(arguments: list[str]) -> int:
    harbor, config_file = arguments
    row = json.loads(Path(os.environ["SKYRL_FAST_TASK"]).read_text())
    config = read_config(Path(config_file).read_text(), os.environ)
    config["task"] = {**config.get("task", {}), "path": row["task"]}
    config |= {"trial_name": NAME, "trials_dir": "trials"}
    Path("trial.json").write_text(json.dumps(config))
    command = [harbor, "trial", "start", "--config", "trial.json"]
    code = subprocess.run(command, check=False).returncode
    result = Path("trials", NAME, "result.json")
    if not result.exists():
        print(f"harbor: {row['task']}: no result; exit code {code}")
        return 1
    try:
        rewards = rewards_of(json.loads(result.read_text()))
    except ValueError as error:
        print(f"harbor: {row['task']}: {error}")
        return 1
    Path("reward.json").write_text(json.dumps(rewards))
    return 0


def read_config(text: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return a configuration with the values of its placeholders."""
    quoted = {name: json.dumps(value)[1:-1] for name, value in variables.items()}
    config: dict[str, Any] = json.loads(string.Template(text).substitute(quoted))
    return config


def rewards_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Return a trial's reward and its other rewards, which are metrics.

    Raises:
        ValueError: it has none, or several of which none is called reward.
    """
    found = (result.get("verifier_result") or {}).get("rewards")
    error = result.get("exception_info")
    if not found and error:
        raise ValueError(f"{error['exception_type']}: {error['exception_message']}")
    if not found:
        raise ValueError("expected a reward of the verifier, got none")
    rewards = dict(found)
    if REWARD not in rewards:
        if len(rewards) > 1:
            names = ", ".join(sorted(rewards))
            raise ValueError(f"expected a reward called {REWARD!r}, got {names}")
        (rewards[REWARD],) = found.values()
    return rewards


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
