"""OpenEnv servers for tests: a scripted one, and those that the package openenv runs."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _http_server import LOOPBACK
from fake_envs import FakePrompt, ScriptedEngine, loop_config, says
from websockets.asyncio.server import ServerConnection, serve

from skyrl_fast.adapters.openenv import OpenEnvs
from skyrl_fast.config import EnvironmentConfig
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.groups import rollout

# What a scripted server does with a message, if not a text to send.
SILENCE = "never answer"
DEATH = "break the connection"


def observed(reward: Any = None, *, done: Any = False, **fields: Any) -> str:
    """Return a server's message with an observation."""
    data = {"observation": {**fields, "metadata": {}}, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


def failed(code: str, message: str = "Invalid message", **data: Any) -> str:
    """Return a server's message with an error."""
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **data}})


class ScriptedServer:
    """Answers each message by `answer(message, number of the message in its session)`."""

    def __init__(self, answer: Callable[[dict[str, Any], int], str]) -> None:
        self._answer = answer
        self.received: list[dict[str, Any]] = []
        self.open_sessions = 0
        self.most_sessions = 0
        self.url = ""

    async def handle(self, connection: ServerConnection) -> None:
        self.open_sessions += 1
        self.most_sessions = max(self.most_sessions, self.open_sessions)
        try:
            number = 0
            async for text in connection:
                message = json.loads(text)
                if message["type"] == "close":
                    break
                self.received.append(message)
                answer = self._answer(message, number)
                number += 1
                if answer == DEATH:
                    connection.transport.abort()
                elif answer != SILENCE:
                    await connection.send(answer)
        finally:
            self.open_sessions -= 1


@contextmanager
def scripted(
    answer: Callable[[dict[str, Any], int], str], kind: type[ScriptedServer] = ScriptedServer
) -> Iterator[ScriptedServer]:
    """Serve in a thread on a free port of loopback."""
    server = kind(answer)
    loop = asyncio.new_event_loop()
    started = threading.Event()
    ended = asyncio.Event()

    async def run() -> None:
        async with serve(server.handle, LOOPBACK, 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            server.url = f"http://{LOOPBACK}:{port}"
            started.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(20)
        loop.close()


RULES = {"role": "user", "content": "Guess a number."}


class SlowEngine(ScriptedEngine):
    """A scripted engine whose answers take so many seconds."""

    def __init__(self, answer: Callable[[Any, int], Any], seconds: float) -> None:
        super().__init__(answer)
        self._seconds = seconds

    async def generate(self, *arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(self._seconds)
        return await super().generate(*arguments, **options)


def played(
    envs: OpenEnvs,
    tokenizer: Any,
    answers: list[str],
    *,
    row: dict[str, Any] | None = None,
    number: int = 1,
    timeout: float = 20.0,
    thinks: float = 0.0,
    **changes: Any,
) -> list[Any]:
    """Roll out `number` trajectories, whose n-th turns answer with the n-th text.

    Args:
        thinks: seconds before an answer, in which all trajectories begin.
    """

    def answer(call: Any, n: int) -> Any:
        turn = tokenizer.decode(call.prompt_token_ids).count("assistant\n") - 1
        return says(tokenizer, answers[turn])

    async def go() -> list[Any]:
        factory = EnvFactory(EnvironmentConfig(timeout_seconds=timeout), make_env=envs)
        prompt = FakePrompt("p", [RULES], env_class="games.py:games", env_extras=row or {})
        config = loop_config(max_turns=6, n_samples_per_prompt=number, max_retries=0, **changes)
        try:
            return await rollout(
                [prompt],
                SlowEngine(answer, thinks),
                tokenizer,
                factory,
                config,
                phase="train",
                policy_version=0,
                seed=1,
            )
        finally:
            await factory.close()

    return asyncio.run(go())


def failure(envs: OpenEnvs, tokenizer: Any, **options: Any) -> str:
    (trajectory,) = played(envs, tokenizer, ["5", "5", "5"], **options)
    assert trajectory.failure is not None
    return trajectory.failure


# Not with vLLM, which requires another mcp: `scripts/peers.py` installs the package here.
SITE = Path(__file__).parents[2] / "build" / "peers" / "openenv"


def with_package() -> dict[str, str]:
    """Return the environment variables of a process that imports openenv.

    It finds no uv, with which `openenv init` would ask a package index for versions.
    """
    return {**os.environ, "PYTHONPATH": str(SITE), "PATH": os.defpath}


@contextmanager
def served(application: str, folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve an application of the folder in a process; yield its URL and the process."""
    command = [sys.executable, "-m", "uvicorn", application, "--host", LOOPBACK, "--port", "0"]
    process = subprocess.Popen(
        command, cwd=folder, env=with_package(), stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            address = re.search(r"running on (http://\S+)", line)
            if address:
                break
        else:
            raise AssertionError("".join(lines))
        reading = threading.Thread(target=process.stderr.read, daemon=True)
        reading.start()  # else a full pipe stops the server
        yield address[1], process
    finally:
        process.kill()
        process.wait()
