"""The policy by which Linux schedules a trainer next to an engine on the CPU."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, subprocess, sys, threading
from skyrl_fast.rollout.engine import vllm_start

NAMES = {os.SCHED_OTHER: "other", os.SCHED_BATCH: "batch", os.SCHED_IDLE: "idle"}
POLICY = "import os; print(os.sched_getscheduler(0))"

def policies():
    child = int(subprocess.check_output([sys.executable, "-c", POLICY]))
    started = []
    thread = threading.Thread(target=lambda: started.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    values = (os.sched_getscheduler(0), os.sched_getscheduler(idle.native_id), *started, child)
    return [NAMES[value] for value in values]

def wait():
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    ready.set()
    end.wait()

ready, end = threading.Event(), threading.Event()
idle = threading.Thread(target=wait)
idle.start()
ready.wait()
for device in ("cpu", "gpu"):
    for first in (False, True, False):
        vllm_start.let_engine_go_first(first, on_cpu=device == "cpu")
        print(*policies())
end.set()
"""
USUAL, BATCH = "other idle other other", "batch idle batch batch"


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's policies")
def test_engine_goes_first_on_a_cpu() -> None:
    """The main thread, one with a policy of its own, a new thread and a new process."""
    command = [sys.executable, "-c", SCRIPT]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.splitlines() == [USUAL, BATCH, USUAL, *[USUAL] * 3]
