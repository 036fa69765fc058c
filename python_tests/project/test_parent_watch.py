"""Processes that exit with their parent, from their first instruction."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
END_SECONDS = 20.0  # of a loaded machine; the kernel needs milliseconds

# A main module that takes long to import in each process: the watch must not wait for it.
PARENT = """
import multiprocessing, os, sys, time
from skyrl_fast.system.parent_watch import children_exit_with_this_process

if __name__ != "__main__" and os.environ.get("STUCK"):
    print("child", os.getpid(), flush=True)
    time.sleep(100)

def child():
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(100,))
    process.start()
    print("grandchild", process.pid, flush=True)
    time.sleep(100)

if __name__ == "__main__":
    with children_exit_with_this_process():
        process = multiprocessing.get_context("spawn").Process(target=child)
        process.start()
    print("child", process.pid, flush=True)
    time.sleep(100)
"""


def gone(process: int) -> bool:
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        status = Path(f"/proc/{process}/status")
        if not status.exists() or "State:\tZ" in status.read_text():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.spec("run.engine-lifetime")
@pytest.mark.parametrize("stuck", ["", "1"], ids=["grandchild", "during imports"])
def test_spawned_processes_exit_with_a_killed_parent(tmp_path: Path, stuck: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "STUCK": stuck}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        lines = [parent.stdout.readline().split() for _ in range(2)]  # stuck: the child twice
        parent.kill()
    children = {int(pid) for _, pid in lines}
    assert len(children) == (1 if stuck else 2)
    assert all(gone(child) for child in children)


BLOCKED = """
import multiprocessing, signal
from skyrl_fast.system.parent_watch import children_exit_with_this_process

def blocked():
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())

if __name__ == "__main__":
    with children_exit_with_this_process():
        pool = multiprocessing.get_context("spawn").Pool(1)
    inside = pool.apply(blocked)
    pool.terminate()
    print(sorted(inside), sorted(blocked()))
"""


LOCKING = """
import multiprocessing, time
from skyrl_fast.system.parent_watch import children_exit_with_this_process

def child(pipe):
    lock = multiprocessing.Lock()  # of a spawned process: it has a name, as vLLM's and tqdm's
    pipe.send(lock._semlock.name)
    time.sleep(100)

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    mine, other = spawn.Pipe()
    with children_exit_with_this_process():
        process = spawn.Process(target=child, args=(other,))
        process.start()
    print(mine.recv())
    process.kill()
    process.join()
"""


def test_semaphores_of_a_killed_process_are_removed_without_a_warning(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(LOCKING)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment
    )
    name = done.stdout.strip()
    assert (done.returncode, done.stderr) == (0, "")
    assert name.startswith("/mp-")
    assert not Path(f"/dev/shm/sem.{name.removeprefix('/')}").exists()


def test_signals_of_the_terminal_do_not_reach_children(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(BLOCKED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.check_output([sys.executable, str(script)], text=True, env=environment)
    assert said.strip() == f"{[signal.SIGHUP, signal.SIGINT]} []"


COLLECTING = """
import atexit, gc, multiprocessing, sys, tempfile
from skyrl_fast.system.parent_watch import children_exit_with_this_process

imported = [tempfile]
if __name__ != "__main__":
    print("imports", gc.isenabled())

def frozen(one):
    return not any(one is other for other in gc.get_objects())  # which lists no frozen ones

def child():
    print("target", gc.isenabled(), frozen(imported), frozen([tempfile]))
    atexit.register(print, "at exit")
    sys.stdout.flush()
    process = multiprocessing.get_context("fork").Process(target=print, args=("forked",))
    process.start()
    process.join()
    sys.exit(7)

if __name__ == "__main__":
    with children_exit_with_this_process():
        process = multiprocessing.get_context("spawn").Process(target=child)
        process.start()
    process.join()
    print("exit code", process.exitcode)
"""


def test_what_a_child_imports_is_not_collected(tmp_path: Path) -> None:
    """And it ends in order, without a last collection."""
    script = tmp_path / "parent.py"
    script.write_text(COLLECTING)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.check_output([sys.executable, str(script)], text=True, env=environment)
    assert said.splitlines() == [
        *("imports False", "target True True False"),
        *("forked", "at exit", "exit code 7"),
    ]


LOGGING = """
import logging, multiprocessing, sys
from skyrl_fast.system.parent_watch import children_exit_with_this_process

if __name__ != "__main__":
    logging.getLogger("library.module").warning("imported")
else:
    with children_exit_with_this_process(sys.argv[1]):
        process = multiprocessing.get_context("spawn").Process(target=print, args=("target",))
        process.start()
    process.join()
"""


def test_what_a_child_logs_while_it_imports_goes_to_the_file(tmp_path: Path) -> None:
    script, config, file = (tmp_path / name for name in ("parent.py", "logging.json", "log"))
    script.write_text(LOGGING)
    handler = {"class": "logging.FileHandler", "filename": str(file)}
    loggers = {"library": {"handlers": ["file"]}}
    config.write_text(json.dumps({"version": 1, "handlers": {"file": handler}, "loggers": loggers}))
    done = subprocess.run(
        [sys.executable, str(script), str(config)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.stdout, done.stderr, file.read_text()) == ("target\n", "", "imported\n")


@pytest.mark.spec("update.engine-exit")
def test_a_child_of_any_kind_exits_with_its_killed_parent() -> None:
    """A server that an actor starts, after its exec."""
    watch = ROOT / "skyrl_fast" / "system" / "parent_watch.py"
    child = (
        "import os, runpy, time; "
        f"runpy.run_path({str(watch)!r})['exit_with_parent'](os.getppid()); "
        "print(os.getpid(), flush=True); time.sleep(100)"
    )
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        process = int(parent.stdout.readline())
        parent.kill()
        assert gone(process)
