"""Environments of the package openenv, in its own servers: played, and trained offline."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _openenv import SITE, failure, played, served, with_package
from _tools import TEMPLATE, CallParser
from _torch_engine import torch_engine as torch_engine  # a fixture

import skyrl_fast
from skyrl_fast.adapters.openenv import OpenEnvs
from skyrl_fast.rollout import groups

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not SITE.exists(), reason="scripts/peers.py installs openenv"),
]

SESSIONS = 16
# What `openenv init` writes, and what it becomes: a reward that can be learned, episodes that end.
EDITS = {
    "server/app.py": {"max_concurrent_envs=1,": f"max_concurrent_envs={SESSIONS},"},
    "server/letters_env_environment.py": {
        "reward = min(length * 0.1, 1.0)": (
            "reward = sum(c.isascii() and c.isalpha() for c in message) / max(length, 1)"
        ),
        "done=False,\n            reward=reward,": "done=True,\n            reward=reward,",
    },
}
WORDS = ("sun", "moon", "rain", "snow", "wind", "star", "tide", "fog")
SHOP = """
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State

class Shop(MCPEnvironment):
    def __init__(self):
        tools = FastMCP("shop")
        self.state_now = State()

        @tools.tool
        def price(item: str) -> float:
            "Return the price of an item."
            if item == "void":
                raise ValueError("no such item")
            return 3.0

        super().__init__(tools)

    def reset(self, seed=None, episode_id=None, **options):
        return Observation()

    async def step_async(self, action, timeout_s=None, **options):
        answer = await super().step_async(action, timeout_s=timeout_s, **options)
        if isinstance(answer, CallToolObservation) and answer.error is None:
            answer.reward = 0.5
        return answer

    def _step_impl(self, action, timeout_s=None, **options):
        raise RuntimeError("no other actions")

    @property
    def state(self):
        return self.state_now

app = create_app(Shop, CallToolAction, CallToolObservation, env_name="shop")
"""


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an environment of openenv's template."""
    folder = tmp_path_factory.mktemp("openenv")
    command = [sys.executable, "-m", "openenv.cli", "init", "letters_env"]
    subprocess.run(command, cwd=folder, env=with_package(), check=True, capture_output=True)
    for name, edits in EDITS.items():
        path = folder / "letters_env" / name
        text = path.read_text()
        for old, new in edits.items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        path.write_text(text)
    return folder


@pytest.mark.usefixtures("torch_engine")
def test_an_environment_of_the_template_is_trained(
    letters: Path, tmp_path: Path, tiny_model_folder: Path, tiny_tokenizer: Any
) -> None:
    settings = {
        "trainer.policy.model.path": tiny_model_folder,
        "trainer.policy.optimizer_config": {"lr": 0.01},
        "trainer.run_path": tmp_path / "run",
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 4,
        "trainer.epochs": 6,
        "trainer.eval_interval": 12,
        "trainer.logger": ["jsonl"],
        "trainer.plot": False,
        "trainer.num_threads": 1,  # tiny matrices
        "generator.n_samples_per_prompt": 4,
        "generator.max_concurrent_trajectories": SESSIONS,
        "generator.sampling_params.max_generate_length": 6,
        "generator.max_input_length": 300,
    }
    rows = [{"prompt": f"say {word}", "seed": n} for n, word in enumerate(WORDS)]
    with served("letters_env.server.app:app", letters) as (url, server):
        envs = OpenEnvs(url, action="message", show="echoed_message")
        result = skyrl_fast.train_agent(settings, env=envs, prompts=rows, eval_prompts=rows)
        assert (result.step, result.signal) == (12, None)
        assert result.before is not None and result.after is not None
        assert result.after > result.before + 0.1

        wrong = OpenEnvs(url, action="text", show="echoed_message")
        assert "step: expected the environment's fields: message: Field required" in failure(
            wrong, tiny_tokenizer
        )
        trajectories = played(envs, tiny_tokenizer, ["hello"], number=SESSIONS + 1, thinks=3.0)
        (full,) = [t.failure for t in trajectories if t.failure is not None]
        assert "CAPACITY_REACHED: Server at capacity: 16/16 sessions active" in full

        server.send_signal(signal.SIGKILL)
        server.wait()
    assert f"{url}: connect: " in failure(envs, tiny_tokenizer)


def test_tools_of_an_environment(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "ToolCallParser", lambda name, tokenizer: CallParser())
    (tmp_path / "shop.py").write_text(SHOP)
    call = '<call>{"name": "price", "arguments": {"%s": "%s"}}</call>'
    answers = [call % ("item", "tea"), call % ("item", "void"), call % ("thing", "tea"), "3"]
    with served("shop:app", tmp_path) as (url, _):
        shop = OpenEnvs(url)
        tools = shop.tools()
        (trajectory,) = played(
            shop,
            tiny_tokenizer,
            answers,
            row={"tools": tools},
            tool_parser="tags",
            chat_template=TEMPLATE,
            max_input_length=4096,
        )
    assert [tool["function"]["name"] for tool in tools] == ["price"]
    assert tools[0]["function"]["parameters"]["required"] == ["item"]
    assert trajectory.failure is None
    assert [step.reward for step in trajectory.steps] == [0.5] * 4
    observations = [step.observation for step in trajectory.steps]
    assert observations[0] == "3.0"
    assert observations[1] == "error: Error calling tool 'price': no such item"
    assert observations[2].startswith("error: 2 validation errors for call[price]\nitem\n")
