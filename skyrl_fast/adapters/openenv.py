"""Environments of OpenEnv servers, as an `Env`: each trajectory is a session."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from skyrl_fast.adapters.openenv_client import INVALID_ACTION, OpenEnvClient, ServerError
from skyrl_fast.rollout.chat_messages import plain_value, with_text
from skyrl_fast.rollout.env.answers import read_reward
from skyrl_fast.rollout.env.protocol import Action, Env, EnvStep, Message
from skyrl_fast.rollout.workers.loop_thread import loop_thread

T = TypeVar("T")

# Errors of pydantic that say that an action has other fields than the environment's.
OTHER_FIELDS = ("missing", "extra_forbidden")
NOT_SHOWN = ("metadata", "reward", "done")
NO_SESSION = "CAPACITY_REACHED"
MORE_SESSIONS = (
    "the server's max_concurrent_envs has to be at least generator.max_concurrent_trajectories"
)


class OpenEnvError(RuntimeError):
    """A server cannot be reached, or its answer is invalid; the text begins with its URL."""


class _ActionError(ValueError):
    """The environment cannot read an action of the model's."""


@dataclass(frozen=True, slots=True)
class OpenEnvs:
    """A factory of environments for `skyrl_fast.train_agent(env=...)` or `environment.env_class`.

    The first observation is added to the row's prompt, and each later one is a user message, or
    messages of tools. `reset` gets the row's columns `seed` and `episode_id`, and those in
    `options`. An action that `action` refuses with a ValueError, or the server as invalid, is
    answered with the reason, and its reward is `invalid_reward`.

    Args:
        server: base URL of a server; or a function that returns a client for a row: an
            `OpenEnvClient`, or one of the package openenv, whose actions and observations may be
            typed.
        action: field of the environment's action that gets the model's text; or a function that
            returns the action; or None: the tool calls of the answer, for environments with MCP
            tools. Then an answer without a call ends the episode.
        show: field of the observation that the model reads; or a function that returns the text;
            or None: its fields as JSON, or the result of a tool.
        total: whether the reward of a step is the sum of the episode's rewards so far, for
            estimators that read the last one; false for those that read each step's.
        invalid_reward: reward of an action that is refused.

    Example:
        games = OpenEnvs("http://127.0.0.1:8000", action="message", show="echoed_message")
        skyrl_fast.train_agent(config, env=games, prompts=rows)
    """

    server: str | Callable[[dict[str, Any]], Any]
    action: str | Callable[[Action], Any] | None = None
    show: str | Callable[[Any], str] | None = None
    total: bool = True
    invalid_reward: float = 0.0

    def __call__(self, row: dict[str, Any]) -> Env:
        return _OpenEnv(self, row)

    def tools(self) -> list[dict[str, Any]]:
        """Return the environment's MCP tools for the column `tools` of rows.

        Raises:
            OpenEnvError: the server has none, or fails.
        """
        env = _OpenEnv(self, {})
        return loop_thread().run_to_end(env.list_tools())

    def client(self, row: dict[str, Any]) -> Any:
        if isinstance(self.server, str):
            return OpenEnvClient(self.server)
        return self.server(row)


class _OpenEnv(Env):
    """One episode, in one session."""

    def __init__(self, parent: OpenEnvs, row: dict[str, Any]) -> None:
        self._parent = parent
        self._row = row
        self._client = parent.client(row)
        self._return = 0.0
        self._has_reward = False
        self._invalid = 0

    async def init(self, messages: list[Message]) -> list[Message]:
        await self._connect()
        arguments = _reset_arguments(self._row)
        first = await self._answer("reset", self._client.reset(**arguments))
        if first.done:
            raise self._error("reset", "expected an episode, got one that is done")
        text = self._shown("reset", first.observation)
        if not text:
            return messages
        return with_text(messages, text)

    async def step(self, action: Action) -> EnvStep:
        try:
            if self._parent.action is None:
                return await self._call_tools(action)
            result = await self._send(self._read(action))
        except _ActionError as error:
            reward = self._refuse()
            return EnvStep(reward, done=False, observations=str(error))
        reward = self._rewarded(result)
        if result.done:
            return EnvStep(reward, done=True)
        text = self._shown("step", result.observation)
        return EnvStep(reward, done=False, observations=text)

    async def list_tools(self) -> list[dict[str, Any]]:
        await self._connect()
        try:
            result = await self._answer("list_tools", self._client.step({"type": "list_tools"}))
        finally:
            await self.close()
        found = result.observation.get("tools")
        if not isinstance(found, list):
            raise self._error("list_tools", "the environment has no MCP tools")
        return [_openai_tool(tool) for tool in found]

    def metrics(self) -> Mapping[str, Any]:
        return {"return": self._return, "invalid_actions": self._invalid}

    async def close(self) -> None:
        if not inspect.isawaitable(self._client):
            await self._client.close()

    async def _connect(self) -> None:
        if inspect.isawaitable(self._client):  # openenv's from_docker_image, from_env
            self._client = await self._answer("connect", self._client)
        await self._answer("connect", self._client.connect())

    def _read(self, action: Action) -> Any:
        """Return the environment's action for an answer."""
        read = self._parent.action
        if isinstance(read, str):
            return {read: str(action)}
        assert read is not None
        try:
            return read(action)
        except ValueError as error:
            raise _ActionError(str(error)) from error

    async def _call_tools(self, action: Action) -> EnvStep:
        if not action.tool_calls:
            if action.unparsed_tool_calls:
                raise _ActionError("error: the tool call cannot be parsed")
            return EnvStep(self._add(0.0), done=True)
        messages = []
        before = self._return
        for call in action.tool_calls:
            function = call["function"]
            wanted = {
                "type": "call_tool",
                "tool_name": function["name"],
                "arguments": function["arguments"],
            }
            try:
                result = await self._send(wanted)
            except _ActionError as error:
                self._refuse()
                text = f"error: {error}"
            else:
                self._rewarded(result)
                if result.done:
                    return EnvStep(self._since(before), done=True)
                text = self._shown("step", result.observation)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        return EnvStep(self._since(before), done=False, observations=messages)

    async def _send(self, action: Any) -> Any:
        """Return the answer to an action; _ActionError if the model is at fault."""
        try:
            return await self._answer("step", self._client.step(action))
        except ServerError as error:
            problems = [_problem(problem) for problem in error.problems]
            text = "; ".join(problems) or str(error)
            kinds = [problem.get("type") for problem in error.problems]
            has_other_fields = any(kind in OTHER_FIELDS for kind in kinds)
            if has_other_fields and not callable(self._parent.action):
                text = f"expected the environment's fields: {text}"
                raise self._error("step", text) from error
            raise _ActionError(text) from error

    async def _answer(self, what: str, call: Awaitable[T]) -> T:
        """Return the result of a call; OpenEnvError if it fails."""
        try:
            return await call
        except ServerError as error:
            if what == "step" and error.code == INVALID_ACTION:
                raise
            text = f"{error}"
            if error.code == NO_SESSION:
                text += f"; {MORE_SESSIONS}"
            raise self._error(what, text) from error
        except Exception as error:  # of any client
            kind = type(error).__name__
            raise self._error(what, f"{kind}: {error}") from error

    def _shown(self, what: str, observation: Any) -> str:
        show = self._parent.show
        if show is None:
            return _shown(observation)
        if callable(show):
            return str(show(observation))
        fields = _fields(observation)
        if show not in fields:
            has = ", ".join(sorted(fields))
            text = f"expected an observation with {show!r}, got one with {has}"
            raise self._error(what, text)
        return _text(fields[show])

    def _refuse(self) -> float:
        """Count an action that is refused; return its reward."""
        self._invalid += 1
        return self._add(self._parent.invalid_reward)

    def _rewarded(self, result: Any) -> float:
        """Return the reward of a step whose answer is this."""
        if result.reward is None:
            if result.done and not self._has_reward:
                raise self._error("step", "expected a reward, got an episode without one")
            return self._add(0.0)
        self._has_reward = True
        try:
            return self._add(read_reward(result.reward, "reward"))
        except ValueError as error:
            raise self._error("step", str(error)) from None

    def _add(self, reward: float) -> float:
        before = self._return
        self._return += reward
        return self._since(before)

    def _since(self, before: float) -> float:
        if self._parent.total:
            return self._return
        return self._return - before

    def _error(self, what: str, text: str) -> OpenEnvError:
        url = getattr(self._client, "base_url", None)
        if url is None:
            url = self._parent.server
        return OpenEnvError(f"{url}: {what}: {text}")


def _reset_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    arguments = dict(plain_value(row.get("options")) or {})
    for name, kind in (("seed", int), ("episode_id", str)):
        value = row.get(name)
        if value is not None:
            arguments[name] = kind(value)  # tables have other numbers than Python's
    return arguments


def _fields(observation: Any) -> dict[str, Any]:
    """Return the fields of an observation, a mapping or a model of pydantic's."""
    if isinstance(observation, Mapping):
        return dict(observation)
    fields: dict[str, Any] = observation.model_dump(mode="json")
    return fields


def _shown(observation: Any) -> str:
    fields = _fields(observation)
    if "tool_name" in fields and "result" in fields:
        return _tool_text(fields)
    for name in NOT_SHOWN:
        fields.pop(name, None)
    if not fields:
        return ""
    return _text(fields)


def _tool_text(fields: Mapping[str, Any]) -> str:
    """Return a tool's result as text; what the model did wrong is one, too."""
    error = fields.get("error")
    if isinstance(error, Mapping):
        return f"error: {error.get('message')}"
    result = fields["result"]
    if not isinstance(result, Mapping) or not isinstance(result.get("content"), list):
        return _text(result)
    texts = []
    for part in result["content"]:
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            texts.append("[no text]")
    text = "\n".join(texts)
    if result.get("is_error"):
        return f"error: {text}"
    return text


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _openai_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def _problem(problem: Mapping[str, Any]) -> str:
    place = problem.get("loc")
    if isinstance(place, list):
        place = ".".join(map(str, place))
    return f"{place}: {problem.get('msg')}"
