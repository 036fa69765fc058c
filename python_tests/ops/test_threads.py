"""Multithreaded loops: pool threads, forked children, concurrent callers."""

import ctypes
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from skyrl_fast import group_advantage, pack_steps, policy_loss
from skyrl_fast.system import torch_threads

ROWS, WIDTH = 512, 1024  # at least two parts if two threads are allowed


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(ROWS, WIDTH, generator=generator)
    return rewards, torch.randint(0, 2, (ROWS, WIDTH), generator=generator)


def advantages(seed: int) -> torch.Tensor:
    return spread(*inputs(seed))


def spread(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return group_advantage(rewards, [row // 4 for row in range(ROWS)], response_mask=mask)


def test_concurrent_callers_get_the_same_results_as_serial_ones() -> None:
    seeds = range(8)
    alone = [advantages(seed) for seed in seeds]
    got: dict[tuple[int, int], torch.Tensor] = {}

    def call(seed: int) -> None:
        for turn in range(5):
            got[seed, turn] = advantages(seed)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in seeds]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert len(got) == 5 * len(seeds)
    assert all(torch.equal(alone[seed], result) for (seed, _), result in got.items())


def test_concurrent_list_and_tensor_calls() -> None:
    """One call holds the GIL while other threads read its lists; the other does not."""
    rows = [list(range(seed, seed + 2000)) for seed in range(600)]
    wanted = torch.tensor(rows).flatten()
    expected = advantages(0)
    wrong: list[str] = []

    def pack() -> None:
        for _ in range(5):
            if not torch.equal(pack_steps({"tokens": rows})["tokens"].values.long(), wanted):
                wrong.append("pack_steps")

    def advantage() -> None:
        for _ in range(20):
            if not torch.equal(advantages(0), expected):
                wrong.append("group_advantage")

    callers = [threading.Thread(target=target) for target in (pack, advantage, pack, advantage)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
        assert not caller.is_alive()
    assert wrong == []


def test_python_objects_are_read_on_the_calling_thread() -> None:
    """Only that thread holds the GIL."""
    readers = set()

    class Token:
        def __index__(self) -> int:
            readers.add(threading.get_ident())
            return 7

    row = [*range(2000), Token()]
    for _ in range(50):
        packed = pack_steps({"tokens": [row] * 600})["tokens"].values
    assert packed.reshape(600, -1)[:, -1].eq(7).all()
    assert readers == {threading.get_ident()}


def test_error_on_a_pool_thread_reaches_the_caller() -> None:
    rewards = torch.zeros(ROWS, WIDTH)
    rewards[-1, 0] = torch.nan  # in the last part
    with pytest.raises(ValueError, match=f"group_advantage: rewards: .* row {ROWS - 1}"):
        group_advantage(rewards, [0] * ROWS)
    assert advantages(1).isfinite().all()


def test_more_threads_than_cores_give_identical_results() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, old, weight = (-torch.rand(ROWS, WIDTH, generator=generator) for _ in range(3))
    results = []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        loss, metrics = policy_loss(logprobs, old, weight, torch.ones(ROWS, WIDTH))[:2]
        results.append((loss, advantages(3), *metrics.values()))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def has_torch_threads() -> bool:
    return hasattr(ctypes.CDLL(None), "GOMP_parallel")


PROGRAM = """
import os, threading, time, torch, warnings
from skyrl_fast.system.torch_threads import end_torch_threads
from test_threads import advantages, has_torch_threads, inputs, spread

def threads(name):
    for task in os.listdir("/proc/self/task"):
        try:
            lines = open(f"/proc/self/task/{task}/status").read().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        fields = dict(line.split(":\\t", 1) for line in lines if ":\\t" in line)
        if fields["Name"].startswith(name):
            yield fields

PARTS = 3  # of the loops of `advantages`, where more threads are allowed
given = inputs(0)
numbers, go, done = torch.ones(1 << 20), threading.Event(), threading.Event()

def other():
    (numbers + 1).sum()
    done.set()
    go.wait()
    print(int((numbers + 1).sum()) - 2 * len(numbers))

if has_torch_threads():
    end_torch_threads()  # of none
    torch.set_num_threads(PARTS)
    (given[0] + 1).sum()
    before = len(os.listdir("/proc/self/task"))
    expected = spread(*given)
    print(len(os.listdir("/proc/self/task")) - before, len(list(threads("skyrl_fast"))))
    torch.set_num_threads(1)
    print(torch.equal(spread(*given), expected))
    print("--- ended")
    torch.set_num_threads(PARTS)
    thread = threading.Thread(target=other)
    thread.start()
    done.wait()
    counts = []
    for end in (False, False, True, True, False):
        end_torch_threads() if end else (numbers + 1).sum()
        counts.append(len(list(threads("python"))))
    print([count - counts[2] for count in counts])
    go.set()
    thread.join()
else:
    print("--- ended")
print("--- pool")
assert not list(threads("skyrl_fast"))  # none before the first call
torch.set_num_threads(PARTS + 1)
for _ in range(3):
    advantages(0)
time.sleep(0.2)
for fields in threads("skyrl_fast"):
    print(fields["State"][0], int(fields["SigBlk"], 16) >> 1 & 1)  # SIGINT is signal 2
print("--- forked", flush=True)
warnings.simplefilter("ignore")  # Python 3.12 warns about fork with threads
torch.set_num_threads(2)
expected = spread(*given).numpy().tobytes()
for _ in range(3):
    child = os.fork()
    if child == 0:  # torch's own threads would hang here
        os._exit(0 if spread(*given).numpy().tobytes() == expected else 1)
    _, status = os.waitpid(child, 0)
    print(status, spread(*given).numpy().tobytes() == expected)
"""


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """What each part of the program prints; one process, as torch's import takes seconds."""
    if sys.platform != "linux":
        pytest.skip("os.fork and /proc")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), "."])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return re.split("^--- .*\n", done.stdout, flags=re.MULTILINE)


needs_torch_threads = pytest.mark.skipif(not has_torch_threads(), reason="torch without libgomp")


@needs_torch_threads
def test_loops_of_all_threads_take_those_of_torch(printed: list[str]) -> None:
    assert printed[0].split() == ["0", "0", "True"]


@pytest.mark.skipif(torch_threads.gnu_openmp() is None, reason="no libgomp, or one before 9")
def test_torch_threads_of_one_thread_end_and_start_again(printed: list[str]) -> None:
    more = 2  # PARTS and the calling thread
    assert printed[1].splitlines() == [str([more, more, 0, 0, more]), "0"]


def test_pool_threads_sleep_and_block_signals(printed: list[str]) -> None:
    assert printed[2].split() == ["S", "1"] * 2


def test_forked_child_has_its_own_pool(printed: list[str]) -> None:
    assert printed[3].split() == ["0", "True"] * 3


def test_simd_level_of_the_environment_holds_from_the_import() -> None:
    environment = {**os.environ, "SKYRL_FAST_SIMD": "baseline"}
    code = "import skyrl_fast; print(skyrl_fast._C.simd_level())"
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "baseline"
