"""Sessions of OpenEnv servers as `Env`, with scripted servers that follow or break the protocol."""

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from _openenv import (
    DEATH,
    SILENCE,
    ScriptedServer,
    failed,
    failure,
    observed,
    played,
    scripted,
)
from _tools import TEMPLATE, CallParser

from skyrl_fast.adapters.openenv import OpenEnvs
from skyrl_fast.adapters.openenv_client import OpenEnvClient
from skyrl_fast.rollout import groups
from skyrl_fast.rollout.env.protocol import Action
from skyrl_fast.rollout.workers.loop_thread import loop_thread

TASKS = {"seed": 3, "episode_id": "e1", "options": {"most": 10}}


def guess(message: dict[str, Any], number: int) -> str:
    """Answer as an environment that wants the number 7, with a reward for each step."""
    data = message["data"]
    if message["type"] == "reset":
        return observed(hint=f"below {data['most']}")
    if not data["guess"].isdigit():
        problem = {"type": "int_parsing", "loc": ["guess"], "msg": "Input should be an integer"}
        return failed("VALIDATION_ERROR", errors=[problem])
    if data["guess"] == "7":
        return observed(1.0, done=True, hint="right")
    return observed(0.25, hint="wrong")


def wait_until_closed(server: ScriptedServer) -> None:
    end = time.monotonic() + 20
    while server.open_sessions and time.monotonic() < end:
        time.sleep(0.01)
    assert server.open_sessions == 0


@pytest.mark.spec("env.openenv")
def test_an_episode_of_a_server(tiny_tokenizer: Any) -> None:
    with scripted(guess) as server:
        games = OpenEnvs(server.url, action="guess", show="hint", invalid_reward=-1.0)
        (trajectory,) = played(games, tiny_tokenizer, ["five", "5", "7"], row=TASKS)
    assert trajectory.failure is None
    prompt = tiny_tokenizer.decode(trajectory.steps[0].prompt_token_ids)
    assert "user\nGuess a number.\n\nbelow 10<|im_end|>" in prompt
    assert [step.observation for step in trajectory.steps] == [
        "guess: Input should be an integer",
        "wrong",
        "",
    ]
    assert [step.reward for step in trajectory.steps] == [-1.0, -0.75, 0.25]
    assert trajectory.env_metrics == {"return": 0.25, "invalid_actions": 1}
    sent = [(message["type"], message["data"]) for message in server.received]
    assert sent[0] == ("reset", {"most": 10, "seed": 3, "episode_id": "e1"})
    assert sent[1:] == [("step", {"guess": text}) for text in ("five", "5", "7")]


def test_rewards_of_each_step_alone(tiny_tokenizer: Any) -> None:
    with scripted(guess) as server:
        games = OpenEnvs(server.url, action="guess", show="hint", total=False)
        (trajectory,) = played(games, tiny_tokenizer, ["5", "x", "7"], row=TASKS)
    assert [step.reward for step in trajectory.steps] == [0.25, 0.0, 1.0]


def test_each_trajectory_has_a_session_and_frees_it(tiny_tokenizer: Any) -> None:
    with scripted(guess) as server:
        games = OpenEnvs(server.url, action="guess")
        trajectories = played(games, tiny_tokenizer, ["5", "7"], row=TASKS, number=5)
        assert server.open_sessions == 0
    assert [trajectory.failure for trajectory in trajectories] == [None] * 5
    assert server.most_sessions == 5
    assert len(server.received) == 15
    (observation,) = {trajectory.steps[0].observation for trajectory in trajectories}
    assert observation == '{"hint": "wrong"}'


def test_a_function_reads_actions_and_another_shows_observations(tiny_tokenizer: Any) -> None:
    def number(action: Action) -> dict[str, str]:
        if "is" not in action:
            raise ValueError("say: it is N")
        return {"guess": action.split()[-1]}

    with scripted(guess) as server:
        games = OpenEnvs(
            lambda row: OpenEnvClient(server.url, headers={"Authorization": "Bearer t"}),
            action=number,
            show=lambda observation: observation["hint"].upper(),
        )
        answers = ["5", "it is five", "it is 5", "it is 7"]
        (trajectory,) = played(games, tiny_tokenizer, answers, row=TASKS)
    observations = [step.observation for step in trajectory.steps]
    assert observations == ["say: it is N", "guess: Input should be an integer", "WRONG", ""]
    assert trajectory.env_metrics["invalid_actions"] == 2


def test_clients_of_the_package_may_be_typed() -> None:
    class Observation:
        def model_dump(self, *, mode: str) -> dict[str, Any]:
            return {"hint": "below 10", "reward": None, "done": False, "metadata": {"a": 1}}

    class Client:
        base_url = None  # a container that has not been started
        actions: list[Any] = []  # noqa: RUF012

        async def connect(self) -> None: ...
        async def close(self) -> None: ...

        async def reset(self, **arguments: Any) -> Any:
            return SimpleNamespace(observation=Observation(), reward=None, done=False)

        async def step(self, action: Any) -> Any:
            self.actions.append(action)
            return SimpleNamespace(observation=Observation(), reward=True, done=True)

    async def from_image(row: dict[str, Any]) -> Client:
        return Client()

    async def go() -> Any:
        env: Any = OpenEnvs(from_image, action=lambda text: ("typed", str(text)))({})
        first = await env.init([])
        answer = await env.step(Action("hello"))
        await env.close()
        return first, answer

    first, answer = asyncio.run(go())
    assert first == [{"role": "user", "content": '{"hint": "below 10"}'}]
    assert (answer.reward, answer.done) == (1.0, True)
    assert Client.actions == [("typed", "hello")]


PRICE = {
    "name": "price",
    "description": "Return a price.",
    "input_schema": {"type": "object", "properties": {"item": {"type": "string"}}},
}


def shop(message: dict[str, Any], number: int) -> str:
    """Answer as an environment with an MCP tool; each price that is found earns a reward."""
    data = message["data"]
    if message["type"] == "reset":
        return observed()
    if data["type"] == "list_tools":
        return observed(tools=[PRICE])
    item = data["arguments"].get("item")
    if item == "number":
        problem = {"type": "string_type", "loc": ["arguments"], "msg": "Input should be text"}
        return failed("VALIDATION_ERROR", errors=[problem])
    if item is None:
        error = {"error_type": "invalid_args", "message": "item is missing"}
        return observed(tool_name="price", result=None, error=error)
    if item == "cash":
        return observed(2.0, done=True, tool_name="price", result=None, error=None)
    content = [{"type": "text", "text": f"{item} costs 3"}]
    result = {"content": content, "is_error": item == "void"}
    return observed(0.5, tool_name="price", result=result, error=None)


def price_of(*items: str) -> str:
    calls = ""
    for item in items:
        call = {"name": "price", "arguments": {"item": item} if item else {}}
        calls += f"<call>{json.dumps(call)}</call>"
    return calls


def shopped(tokenizer: Any, answers: list[str], **options: Any) -> tuple[Any, ScriptedServer]:
    with pytest.MonkeyPatch.context() as patch, scripted(shop) as server:
        patch.setattr(groups, "ToolCallParser", lambda name, tokenizer: CallParser())
        shops = OpenEnvs(server.url, **options)
        (trajectory,) = played(
            shops,
            tokenizer,
            answers,
            row={"tools": shops.tools()},
            tool_parser="tags",
            chat_template=TEMPLATE,
        )
        wait_until_closed(server)
    return trajectory, server


@pytest.mark.spec("env.openenv")
def test_tool_calls_of_a_model(tiny_tokenizer: Any) -> None:
    answers = [price_of("tea", ""), "<call>{", price_of("void"), "It costs 3."]
    trajectory, server = shopped(tiny_tokenizer, answers, invalid_reward=-0.25)
    assert trajectory.failure is None
    prompts = [tiny_tokenizer.decode(step.prompt_token_ids) for step in trajectory.steps]
    assert "<tool>price</tool>" in prompts[0]
    assert [step.observation for step in trajectory.steps] == [
        "tea costs 3\nerror: item is missing",
        "error: the tool call cannot be parsed",
        "error: void costs 3",
        "",
    ]
    # The last answer has no reward of its own: the sum is the outcome.
    assert [step.reward for step in trajectory.steps] == [0.5, 0.25, 0.75, 0.75]
    calls = [m["data"] for m in server.received if m["data"].get("type") == "call_tool"]
    assert calls[0] == {"type": "call_tool", "tool_name": "price", "arguments": {"item": "tea"}}


def test_a_tool_may_end_the_episode_before_later_calls(tiny_tokenizer: Any) -> None:
    answers = [price_of("tea"), price_of("tea", "cash", "tea")]
    trajectory, server = shopped(tiny_tokenizer, answers, total=False)
    assert [step.reward for step in trajectory.steps] == [0.5, 2.5]
    items = [m["data"]["arguments"]["item"] for m in server.received if "arguments" in m["data"]]
    assert items == ["tea", "tea", "cash"]


def test_a_call_that_is_refused_has_an_answer_as_the_others(tiny_tokenizer: Any) -> None:
    answers = [price_of("tea", "number", "tea"), "3"]
    trajectory, _ = shopped(tiny_tokenizer, answers, total=False, invalid_reward=-0.25)
    text = "tea costs 3\nerror: arguments: Input should be text\ntea costs 3"
    assert [step.observation for step in trajectory.steps] == [text, ""]
    assert [step.reward for step in trajectory.steps] == [0.75, 0.0]
    assert trajectory.env_metrics["invalid_actions"] == 1


def test_tools_of_an_environment_without_any() -> None:
    with (
        scripted(lambda message, n: failed("VALIDATION_ERROR")) as server,
        pytest.raises(RuntimeError, match=f"{server.url}: list_tools: VALIDATION_ERROR: Invalid"),
    ):
        OpenEnvs(server.url).tools()
    with (
        scripted(lambda message, n: observed(echo="?")) as server,
        pytest.raises(RuntimeError, match=f"{server.url}: list_tools: the environment has no MCP"),
    ):
        OpenEnvs(server.url).tools()


def on_step(answer: str) -> Any:
    """Answer the reset, and then with this."""
    return lambda message, number: observed(hint="go") if number == 0 else answer


def on_reset(answer: str) -> Any:
    return lambda message, number: answer


FIELDS = [
    {"type": "missing", "loc": ["message"], "msg": "Field required"},
    {"type": "extra_forbidden", "loc": ["guess"], "msg": "Extra inputs are not permitted"},
]
HOSTILE = {
    "dies in reset": (on_reset(DEATH), "reset: ConnectionClosedError: no close frame"),
    "dies in step": (on_step(DEATH), "step: ConnectionClosedError: no close frame"),
    "no JSON": (on_step("<html>"), "step: ValueError: expected JSON, got '<html>'"),
    "deep JSON": (on_step("[" * 100_000), "step: ValueError: expected JSON, got '[[["),
    "no mapping": (on_step("[1]"), "step: ValueError: expected a message with type and data"),
    "no data": (on_step('{"type": "error"}'), "step: ValueError: expected a message with type"),
    "no observation": (
        on_reset('{"type": "observation", "data": {"reward": 1}}'),
        "reset: ValueError: expected an observation",
    ),
    "another field": (
        on_reset(observed(text="?")),
        "reset: expected an observation with 'hint', got one with metadata, text",
    ),
    "done at once": (on_reset(observed(done=True, hint="")), "reset: expected an episode"),
    "no reward": (
        on_step(observed(done=True, hint="")),
        "step: expected a reward, got an episode without one",
    ),
    "reward is text": (
        on_step(observed("much", done=True, hint="")),
        "step: reward: expected a finite float32 number, got 'much'",
    ),
    "reward is not finite": (
        on_step(observed(float("nan"), hint="")),
        "step: reward: expected a finite float32 number, got nan",
    ),
    "done is text": (
        on_step(observed(1.0, done="no", hint="")),
        "step: ValueError: done: expected true or false, got 'no'",
    ),
    "its code raises": (
        on_step(failed("EXECUTION_ERROR", "no such table")),
        "step: EXECUTION_ERROR: no such table",
    ),
    "too many sessions": (
        on_reset(failed("CAPACITY_REACHED", "Server at capacity: 1/1 sessions active")),
        "reset: CAPACITY_REACHED: Server at capacity: 1/1 sessions active; the server's "
        "max_concurrent_envs has to be at least generator.max_concurrent_trajectories",
    ),
    "other fields": (
        on_step(failed("VALIDATION_ERROR", errors=FIELDS)),
        "step: expected the environment's fields: message: Field required; guess: Extra inputs",
    ),
}


@pytest.mark.spec("env.openenv-errors")
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_servers_are_named(case: str, tiny_tokenizer: Any) -> None:
    answer, expected = HOSTILE[case]
    with scripted(answer) as server:
        envs = OpenEnvs(server.url, action="guess", show="hint")
        said = failure(envs, tiny_tokenizer)
        wait_until_closed(server)
    assert "environment games.py:games: " in said
    assert f"raised OpenEnvError: {server.url}: {expected}" in said


@pytest.mark.spec("env.openenv-errors")
@pytest.mark.parametrize("script", [on_reset, on_step])
def test_a_server_that_never_answers(script: Any, tiny_tokenizer: Any) -> None:
    with scripted(script(SILENCE)) as server:
        envs = OpenEnvs(server.url, action="guess", show="hint")
        said = failure(envs, tiny_tokenizer, timeout=0.5)
        wait_until_closed(server)
    assert "games.py:games" in said
    assert "did not return within 0.5 s; it was at: " in said
    assert "openenv_client.py" in said


def test_no_server(tiny_tokenizer: Any) -> None:
    with scripted(guess) as server:
        pass
    said = failure(OpenEnvs(server.url, action="guess"), tiny_tokenizer)
    assert f"{server.url}: connect: ConnectionRefusedError: " in said


def test_a_server_of_something_else(tiny_tokenizer: Any) -> None:
    from _http_server import serving

    async def not_found(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.close", "code": 1000})

    with serving(not_found) as port:
        url = f"http://127.0.0.1:{port}"
        said = failure(OpenEnvs(url, action="guess"), tiny_tokenizer)
    assert f"{url}: connect: InvalidStatus: server rejected WebSocket connection: HTTP 403" in said


def test_a_refused_session_is_named_after_the_connection_has_ended() -> None:
    """As OpenEnv's server: an error that nobody asked for, and the end of the connection."""

    async def go(url: str) -> None:
        client = OpenEnvClient(url)
        await client.connect()
        assert client._connection is not None
        await client._connection.wait_closed()
        try:
            await client.reset()
        finally:
            await client.close()

    class Full(ScriptedServer):
        async def handle(self, connection: Any) -> None:
            await connection.send(failed("CAPACITY_REACHED", "full"))
            await connection.close()

    with scripted(guess, Full) as server, pytest.raises(RuntimeError, match="REACHED: full"):
        loop_thread().run_to_end(go(server.url))
