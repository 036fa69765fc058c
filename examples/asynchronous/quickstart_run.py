"""A quickstart run in a separate process, with the slow environment; started by the examples."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from skyrl_fast.trajectory_store import read_index
from skyrl_fast.trajectory_store.parts import IndexEntry

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONFIG = ROOT / "examples/quickstart/config.yaml"


def prepare(base: Path) -> None:
    """Create the quickstart's data and model in `base`, and prompts for the slow environment."""
    from examples.quickstart.run import prepare as prepare_quickstart

    prepare_quickstart(base / "quickstart")
    for name in ("train", "eval"):
        rows = (base / f"quickstart/data/{name}.jsonl").read_text(encoding="utf-8").splitlines()
        slow = [json.dumps({**json.loads(row), "env_class": "slow_text2sql"}) for row in rows]
        (base / f"slow_{name}.jsonl").write_text("\n".join(slow) + "\n", encoding="utf-8")


def settings(
    run_path: str, *, staleness: int | None, seed: int = 0, env: str = "", slow_eval: bool = False
) -> list[str]:
    """Return overrides of the quickstart's settings.

    Args:
        run_path: the run's folder.
        staleness: None: synchronous.
        env: further settings of the environment, such as "failures: 0.05".
        slow_eval: whether to evaluate in the slow environment too.
    """
    result = [
        "data.train_data=[slow_train.jsonl]",
        f"trainer.run_path={run_path}",
        f"trainer.seed={seed}",
        "trainer.logger=[jsonl]",
        "trainer.plot=false",
        f"environment.register=[{HERE / 'slow_env.py'}]",
        "environment.skyrl_gym.max_env_workers=1024",
        "environment.skyrl_gym.env_config={slow_text2sql: {db_path: quickstart/data/databases"
        + (f", {env}" if env else "")
        + "}}",
    ]
    if slow_eval:
        result.append("data.val_data=[slow_eval.jsonl]")
    if staleness is not None:
        result += [
            "trainer.fully_async.enabled=true",
            f"trainer.fully_async.max_staleness_steps={staleness}",
            "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        ]
    return result


def start(base: Path, overrides: Sequence[str], *, log: str) -> subprocess.Popen[bytes]:
    """Start `skyrl-fast train` in `base`; its output goes to the file `log` there."""
    command = [sys.executable, "-m", "skyrl_fast", "train", str(CONFIG), *overrides]
    with (base / log).open("ab") as file:
        return subprocess.Popen(command, cwd=base, stdout=file, stderr=file, env=environment())


def train(base: Path, overrides: Sequence[str], *, log: str) -> None:
    """Run to the end.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    process = start(base, overrides, log=log)
    if process.wait():
        text = (base / log).read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"training exited with {process.returncode}:\n{text[-3000:]}")


def environment() -> dict[str, str]:
    """Return environment variables with which Python finds this package."""
    import os

    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def trained(run_path: Path) -> list[IndexEntry]:
    """Return the index entry of each trained trajectory."""
    return [entry for entry in read_index(run_path) if entry.phase == "train"]
