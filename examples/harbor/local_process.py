"""An environment and an agent of Harbor for tests: processes here, in no sandbox.

Both run in Harbor's own environment (Python 3.12). The environment puts the paths of a container
(/app, /logs, /tests) under a temporary folder, so that a task's scripts have to name them by the
variables APP, LOGS and TESTS.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import httpx
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.agent.context import AgentContext

FOLDERS = ("app", "logs", "tests")


class LocalProcesses(BaseEnvironment):
    """Runs commands as the user, in a temporary folder."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="harbor_local_"))
        super().__init__(*arguments, **options)

    @staticmethod
    def type() -> str:
        return "local-processes"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities()

    def _validate_definition(self) -> None:
        return

    async def start(self, force_build: bool) -> None:
        for name in FOLDERS:
            (self._root / name).mkdir(exist_ok=True)
        for path in ("agent", "verifier", "artifacts"):
            (self._root / "logs" / path).mkdir(exist_ok=True)

    async def stop(self, delete: bool) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target = self._here(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, target)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._here(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy(self._here(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._here(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        for name in FOLDERS:
            command = command.replace(f"/{name}/", f"{self._root}/{name}/")
        places = {name.upper(): str(self._root / name) for name in FOLDERS}
        process = await asyncio.create_subprocess_shell(
            command,
            cwd=self._here(cwd or "/app"),
            env={**os.environ, **places, **(env or {})},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(timeout_sec):
            out, err = await process.communicate()
        return ExecResult(
            stdout=out.decode(), stderr=err.decode(), return_code=process.returncode or 0
        )

    def _here(self, path: str) -> Path:
        return self._root / path.lstrip("/")


class OneAnswer(BaseAgent):
    """Asks the model once and writes its answer to answer.txt in the environment."""

    @staticmethod
    def name() -> str:
        return "one-answer"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        return

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        variables = self.extra_env
        async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
            response = await client.post(
                f"{variables['OPENAI_BASE_URL']}/chat/completions",
                headers={"Authorization": f"Bearer {variables['OPENAI_API_KEY']}"},
                json={
                    "model": variables["OPENAI_MODEL"],
                    "messages": [{"role": "user", "content": instruction}],
                },
            )
        response.raise_for_status()
        answer = response.json()["choices"][0]["message"]["content"]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(answer)
            file.flush()
            await environment.upload_file(file.name, "/app/answer.txt")
