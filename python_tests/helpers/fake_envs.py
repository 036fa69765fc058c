"""Scripted environments, an engine and prompts for the tests of the rollouts."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from skyrl_fast.config import EnvironmentConfig, GeneratorConfig, SamplingParams, SkyRLGymConfig
from skyrl_fast.rollout.chat_template import ChatTemplate
from skyrl_fast.rollout.context import Context, begin_context
from skyrl_fast.rollout.engine.protocol import Generation
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.groups import rollout
from skyrl_fast.rollout.trajectory import Trajectory

skyrl_gym = pytest.importorskip("skyrl_gym")  # without it, tests that import this file skip

from skyrl_gym.envs.base_text_env import BaseTextEnv  # noqa: E402


class CountingEnv(BaseTextEnv):
    """Answers `obs<n>` with reward n for `turns` turns; `extras` select faults."""

    closed: list[str] = []  # noqa: RUF012 - shared on purpose
    lock = threading.Lock()

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.env_config = env_config
        self.extras = extras or {}
        self.max_turns = self.extras["max_turns"]
        self.actions: list[str] = []
        time.sleep(self.extras.get("make_seconds", 0.0))

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        self.actions.append(action)
        if self.turns == self.extras.get("raise_at"):
            raise RuntimeError("the database is locked")
        if self.turns == self.extras.get("hang_at"):
            time.sleep(self.extras["hang_seconds"])
        if self.turns == self.extras.get("odd_at"):
            return self.extras["odd_answer"]
        done = self.turns >= self.extras.get("turns", 10**6)
        text = self.extras.get("observation", f"obs{self.turns}")
        answer = {
            "observations": [] if done else [{"role": "user", "content": text}],
            "reward": float(self.turns),
            "done": done,
            "metadata": {},
        }
        if "messages" in self.extras and not done:
            answer["observations"] = self.extras["messages"]
        if "rewrite" in self.extras:
            answer["postprocessed_action"] = self.extras["rewrite"]
        return answer

    def get_metrics(self) -> dict[str, Any]:
        if self.extras.get("odd_metrics"):
            raise KeyError("score")
        return {"turns": self.turns, "last_action": self.actions[-1] if self.actions else ""}

    def close(self) -> None:
        with self.lock:
            CountingEnv.closed.append(self.extras.get("name", ""))


class FlakyEnv(CountingEnv):
    """Raises in the first `fail_times` episodes of each name, then works."""

    failures: dict[str, int] = {}  # noqa: RUF012 - shared on purpose

    def step(self, action: str) -> dict[str, Any]:
        name = self.extras["name"]
        with self.lock:
            seen = FlakyEnv.failures.get(name, 0)
            FlakyEnv.failures[name] = seen + 1
        if seen < self.extras["fail_times"]:
            raise ConnectionError("the server went away")
        return super().step(action)


def register_fakes() -> None:
    """Register the environments with skyrl_gym, once."""
    for name, cls in (("counting", CountingEnv), ("flaky", FlakyEnv)):
        if name not in skyrl_gym.registry:
            skyrl_gym.register(name, entry_point=cls)


@dataclass(frozen=True)
class FakePrompt:
    """The attributes of a prompt that `rollout` uses."""

    uid: str
    messages: list[dict[str, str]] = field(
        default_factory=lambda: [{"role": "user", "content": "task"}]
    )
    env_class: str = "counting"
    env_extras: dict[str, Any] = field(default_factory=dict)
    data_source: str | None = None


@dataclass
class Call:
    """One request that the engine saw."""

    prompt_token_ids: list[int]
    sampling: SamplingParams
    session_id: str
    policy_version: int
    seed: int | None = None
    policy: str | None = None


class ScriptedEngine:
    """Answers each request with `answer(call, number)` (None: never), and records all requests."""

    def __init__(self, answer: Callable[[Call, int], Generation | Exception | None]) -> None:
        self._answer = answer
        self.calls: list[Call] = []
        self.running = 0
        self.most_running = 0

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def reset_prefix_cache(self) -> None:
        pass

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session_id: str,
        policy_version: int,
        seed: int | None = None,
        expert_indices_start: int = 0,
        policy: str | None = None,
    ) -> Generation:
        ids = prompt_token_ids  # a list is kept as it is: it may not grow
        ids = ids if isinstance(ids, list) else list(ids)
        call = Call(ids, sampling, session_id, policy_version, seed, policy)
        self.calls.append(call)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0)
            answer = self._answer(call, len(self.calls) - 1)
            if answer is None:
                await asyncio.Event().wait()
        finally:
            self.running -= 1
        if isinstance(answer, Exception):
            raise answer
        return answer


def says(tokenizer: Any, text: str, *, end: bool = True, stop: str | None = None) -> Generation:
    """Return an answer of these characters, one token each, with logprob -0.5."""
    ids = tokenizer.encode(text) + ([tokenizer.eos_token_id] if end else [])
    return Generation(ids, [-0.5] * len(ids), "stop", stop)


def loop_config(**changes: Any) -> GeneratorConfig:
    """Return settings of an agent loop of one turn and one trajectory per prompt."""
    first = {
        "n_samples_per_prompt": 1,
        "max_turns": 1,
        "max_input_length": 512,
        "context": "append",
    }
    return GeneratorConfig(**(first | changes))


def run(
    tokenizer: Any,
    prompts: list[FakePrompt],
    config: GeneratorConfig,
    engine: ScriptedEngine,
    *,
    phase: str = "train",
    timeout: float = 20.0,
    workers: int = 8,
    seed: int = 1,
    policy_version: int = 7,
    make_env: Any = None,
) -> list[Trajectory]:
    """Roll out with scripted environments and engine; `make_env`: in place of those."""

    async def go() -> list[Trajectory]:
        factory = EnvFactory(
            EnvironmentConfig(
                timeout_seconds=timeout, skyrl_gym=SkyRLGymConfig(max_env_workers=workers)
            ),
            make_env=make_env,
        )
        try:
            return await rollout(
                prompts,
                engine,
                tokenizer,
                factory,
                config,
                phase=phase,
                policy_version=policy_version,
                seed=seed,
            )
        finally:
            await factory.close()

    return asyncio.run(go())


def prompt_with(**extras: Any) -> FakePrompt:
    """Return a prompt; `extras` select the behaviour of its environment."""
    return FakePrompt("p", env_extras=extras)


def make_context(
    kind: str,
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    max_length: int | None = None,
) -> Context:
    template = ChatTemplate(tokenizer, chat_template, template_kwargs, max_length=max_length)
    return begin_context(kind, template, messages)
