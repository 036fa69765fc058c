"""Commands that leave anything in place of their files and folders, from a generated table."""

import asyncio
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from _leftovers import ALL, NEVER_END, Leftover

from skyrl_fast.gateway.agents.command import CommandAgent
from skyrl_fast.gateway.agents.task import AgentTask
from skyrl_fast.rollout.env.errors import EnvError

SAMPLE = 40  # of the default run; another one for each seed
SECONDS = 20.0  # that an end may take: the command's deadline and 5 s for the leash, on slow cores
GAP_SECONDS = 1.0
AT_ONCE = 8


@dataclass(frozen=True)
class End:
    """How a behaviour ended."""

    text: str  # "reward 1.0", "late" or the error
    seconds: float  # after it was ready
    left: list[str]  # files and processes


class Heart:
    """The longest time for which the event loop did not beat."""

    gap = 0.0

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            task.cancel()

    async def _beat(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            self.gap = max(self.gap, time.monotonic() - before - 0.01)


async def end_of(case: Leftover, root: Path) -> End:
    """Run a behaviour; what does not end by itself is cancelled when it is ready."""
    parent, out = root / "parent", root / "out"
    parent.mkdir(parents=True)
    out.mkdir()
    (out / "kept").write_text("1")
    command = [sys.executable, "-I", "-S", "-c", case.code, str(out)]
    agent = CommandAgent(command, reward_file="d/r", parent=parent)
    running = asyncio.create_task(agent.run(AgentTask({}, "http://nowhere", "key", "model")))
    while not running.done() and not (out / "ready").exists():
        await asyncio.sleep(0.01)
    began = time.monotonic()
    if case.end in NEVER_END:
        await asyncio.sleep(0.05)
        running.cancel()
    await asyncio.wait([running], timeout=SECONDS)
    seconds = time.monotonic() - began
    if not running.done():
        text = "hangs"
    elif running.cancelled():
        text = "late"
    elif (error := running.exception()) is None:
        text = f"reward {running.result().reward}"
    else:
        text = str(error) if isinstance(error, EnvError) else f"bare {error!r}"
    if not (out / "ready").exists():
        text = f"not tried: {text}"
    left = await asyncio.to_thread(left_of, root)
    return End(text, seconds, left)


def left_of(root: Path) -> list[str]:
    """Return what remains of a command, other than what it has put outside of its folder."""
    parent = root / "parent"
    can_delete = os.access(parent, os.X_OK)  # else only root could
    with suppress(OSError):
        parent.chmod(0o700)
    deadline = time.monotonic() + 5.0  # SIGKILL takes effect a little later
    while (left := processes_of(root)) and time.monotonic() < deadline:
        time.sleep(0.02)
    if (root / "out" / "kept").read_text() != "1":
        left.append("a file outside was changed")
    if parent.is_dir() and not parent.is_symlink():
        for path in parent.iterdir():
            is_folder = path.is_dir() and not path.is_symlink() and "-moved" not in path.name
            if is_folder and can_delete and path.name.startswith("skyrl_fast_agent_"):
                left.append(path.name)
    return left


def processes_of(root: Path) -> list[str]:
    left = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and os.fsencode(root) in ((process / "environ").read_bytes()):
                left.append((process / "cmdline").read_text(errors="replace")[-100:])
    return left


def ends_of(cases: list[Leftover], root: Path, heart: Heart) -> list[End]:
    async def go() -> list[End]:
        places = asyncio.Semaphore(AT_ONCE)

        async def one(number: int, case: Leftover) -> End:
            async with places:
                folder = root / f"case{number}-"
                end = await end_of(case, folder)
                for delete in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
                    process = await asyncio.create_subprocess_exec(*delete, str(folder))
                    await process.wait()
                return end

        async with heart.beating():
            return await asyncio.gather(*(one(*case) for case in enumerate(cases)))

    return asyncio.run(go())


def sample() -> list[Leftover]:
    return random.Random(0).sample(ALL, SAMPLE)


@pytest.mark.spec("gateway.command-left-behind", "gateway.command")
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(sample(), id="sample"),
        pytest.param(
            ALL, id="all", marks=[pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]
        ),
    ],
)
def test_each_behaviour_of_a_command_ends_by_name_and_leaves_nothing(
    cases: list[Leftover], tmp_path: Path
) -> None:
    heart = Heart()
    ends = ends_of(cases, tmp_path, heart)
    wrong = [
        (case, end)
        for case, end in zip(cases, ends, strict=True)
        if not end.text.startswith(("reward", "agent.", "late")) or end.left
    ]
    kinds = Counter(end.text.partition(":")[0].partition(" ")[0] for end in ends)
    slowest = max(end.seconds for end in ends)
    print(
        f"{len(cases)}: {dict(kinds)}; longest gap {heart.gap:.2f} s, longest end {slowest:.1f} s"
    )
    shutil.rmtree(tmp_path, ignore_errors=True)
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(map(str, wrong[:20]))
    assert heart.gap <= GAP_SECONDS
