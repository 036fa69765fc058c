"""Agents to run in the trainer, in processes and on nodes, and what they leave."""

import sys
import time
from pathlib import Path
from typing import Any

import process_agents
from _gateway import Played

from skyrl_fast.gateway.agents.task import AgentTask

CALL = """
import json, os, sys, urllib.request
row = json.load(open(os.environ["SKYRL_FAST_TASK"]))
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": row["prompt"]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {
    "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request))
text = answer["choices"][0]["message"]["content"]
open("answer.txt", "w").write(text)
"""
FORKS = """
import subprocess, sys, time, os
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
open(%r, "w").write(f"{os.getpid()} {child.pid}")
time.sleep(%r)
"""
FILE = process_agents.__file__
SOLVE = f"{FILE}:solve"


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def steps(out: Played) -> list[list[Any]]:
    """Return what training sees of the steps."""
    return [
        [(s.prompt_token_ids, s.response_ids, s.rollout_logprobs, s.reward) for s in t.steps]
        for t in out.trajectories
    ]


def task_of(row: dict[str, Any]) -> AgentTask:
    return AgentTask(row, "http://gateway", "key", "policy")


def says_hello(times: int) -> dict[str, str]:
    return {"role": "user", "content": "hello " * (times + 1)}


def read_pids(file: Path) -> list[int]:
    return [int(pid) for pid in file.read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [pid for pid in pids if is_running(pid)] == []
