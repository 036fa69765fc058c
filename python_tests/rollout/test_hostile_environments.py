"""What an environment returns ends at most its trajectory, whatever its objects do."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from fake_envs import FakePrompt, ScriptedEngine, loop_config, make_context, says
from hostile_answers import HostileEnv, LoudError, SilentError

from skyrl_fast.config import EnvironmentConfig
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.env.handler import EnvHandler, EnvSettings
from skyrl_fast.rollout.env.protocol import Env, EnvStep
from skyrl_fast.rollout.groups import rollout
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.rollout.workers.plain import MAX_DEPTH, PlainData
from skyrl_fast.rollout.workers.traces import MAX_FRAMES, innermost_place
from skyrl_fast.system.printable import MAX_FAILURE

TEXT = 10_000  # longest text of the environments here
GOOD = {"observations": "more", "reward": 0.5, "done": False}


def run(
    tokenizer: Any,
    rows: list[dict[str, Any]],
    make_env: Callable[[Any], Any],
    *,
    timeout: float = 20.0,
    **changes: Any,
) -> list[Trajectory]:
    """Roll out one trajectory of two turns for each row."""
    config = loop_config(**({"max_turns": 2, "max_retries": 0} | changes))

    async def go() -> list[Trajectory]:
        factory = EnvFactory(
            EnvironmentConfig(timeout_seconds=timeout), make_env=make_env, longest_text=TEXT
        )
        engine = ScriptedEngine(lambda call, number: says(tokenizer, "ok"))
        prompts = [FakePrompt(f"p{number}", env_extras=row) for number, row in enumerate(rows)]
        try:
            options: dict[str, Any] = {"phase": "train", "policy_version": 1, "seed": 1}
            return await rollout(prompts, engine, tokenizer, factory, config, **options)
        finally:
            await factory.close()

    return asyncio.run(go())


def env_that(**methods: Callable[..., Any]) -> type[Env]:
    """Return an environment with these methods."""
    defaults = {"__init__": lambda self, row: None, "step": lambda self, action: dict(GOOD)}
    return type("One", (Env,), defaults | methods)


def raises(error: BaseException) -> Callable[..., Any]:
    def method(*_: Any) -> Any:
        raise error

    return method


def with_method(name: str, method: Callable[..., Any], base: type = object) -> type:
    return type("Odd", (base,), {name: method})


@pytest.mark.spec("rollout.env-hostile-objects")
@pytest.mark.parametrize(
    ("methods", "failure"),
    [
        ({"step": raises(SilentError())}, "step raised SilentError: (its text cannot be read)"),
        (
            {
                "step": lambda *_: {
                    **GOOD,
                    "reward": with_method("__float__", raises(SystemExit(3)))(),
                }
            },
            "step raised SystemExit: 3",
        ),
        (
            {
                "step": lambda *_: {
                    **GOOD,
                    "done": with_method("__bool__", raises(KeyboardInterrupt()))(),
                }
            },
            "step raised KeyboardInterrupt: ",
        ),
        (
            {
                "step": lambda *_: EnvStep(
                    0.5, False, with_method("get", raises(SystemExit(4)), dict)()
                )
            },
            "step: expected messages with role and content, got [{}]",
        ),
        (
            {"init": lambda *_: [with_method("items", raises(SilentError()), dict)(role="user")]},
            "init raised SilentError: (its text cannot be read)",
        ),
        ({"__init__": raises(SystemExit(5))}, "make raised SystemExit: 5"),
        (
            {"step": lambda *_: {**GOOD, "observations": {"role": "user", "content": object()}}},
            "step: messages: expected texts, numbers, truth values, None, lists and mappings, got "
            "object",
        ),
        ({"step": raises(StopIteration(1))}, "step raised StopIteration: 1"),
    ],
)
def test_odd_objects_end_only_their_trajectory(
    tiny_tokenizer: Any, methods: dict[str, Any], failure: str
) -> None:
    def make_env(row: Any) -> Any:
        return env_that(**(methods if row["odd"] else {}))(row)

    odd, good = run(tiny_tokenizer, [{"odd": True}, {"odd": False}], make_env)
    assert (odd.stop_reason, odd.failure) == ("env_error", f"environment counting: {failure}")
    assert (good.failure, len(good.steps)) == (None, 2)


@pytest.mark.parametrize("place", ["reward", "done", "exception", "message", "metrics"])
def test_object_that_blocks_while_it_is_read_ends_only_its_trajectory(
    tiny_tokenizer: Any, place: str
) -> None:
    release = threading.Event()

    def blocks(*_: Any) -> Any:
        release.wait(60)
        return 1

    def step(self: Any, action: str) -> Any:
        if place == "exception":
            raise with_method("__str__", blocks, Exception)()
        if place == "message":
            return {**GOOD, "observations": [with_method("items", blocks, dict)(role="user")]}
        method = {"reward": "__float__", "done": "__bool__"}.get(place)
        return {**GOOD, place: with_method(method, blocks)()} if method else dict(GOOD)

    def metrics(self: Any) -> Any:
        return {"score": with_method("__str__", blocks)()} if place == "metrics" else {}

    def make_env(row: Any) -> Any:
        return env_that(**({"step": step, "metrics": metrics} if row["odd"] else {}))(row)

    rows = [{"odd": True}, {"odd": False}]
    odd, good = run(tiny_tokenizer, rows, make_env, timeout=1.0)
    release.set()
    if place == "metrics":
        assert odd.failure is None
    else:
        late = "environment counting: step did not return within 1 s; it was at: File "
        assert str(odd.failure).startswith(late)
    assert odd.env_metrics == {}
    assert (good.failure, len(good.steps)) == (None, 2)


def test_code_that_runs_when_an_environment_is_freed_runs_in_its_thread(
    tiny_tokenizer: Any,
) -> None:
    threads: list[str] = []

    def freed(self: Any) -> None:
        threads.append(threading.current_thread().name)

    run(tiny_tokenizer, [{}], env_that(__del__=freed))
    assert threads == ["environment"]


@pytest.mark.spec("rollout.env-failure-text")
def test_text_of_a_failure_is_cut_and_its_place_is_logged(
    tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        (odd,) = run(tiny_tokenizer, [{}], env_that(step=raises(LoudError())))
    assert odd.failure is not None
    assert len(odd.failure) < MAX_FAILURE + 100
    assert f'File "{__file__}", line ' in caplog.text
    assert "in method" in caplog.text
    assert max(len(record.getMessage()) for record in caplog.records) < 2_500


def test_trace_is_a_traceback_of_the_environment_alone() -> None:
    def deep(number: int) -> None:
        if number == 0:
            raise ValueError("end")
        deep(number - 1)

    env = env_that(step=lambda *_: deep(50))
    host = EnvHandler(EnvSettings({}, env, TEXT))
    assert host.call("make", ("x", {})).failure is None
    trace = host.call("step", "a").trace
    line = deep.__code__.co_firstlineno + 2
    assert innermost_place(trace) == f'File "{__file__}", line {line}, in deep'
    assert trace.endswith('    raise ValueError("end")\n')
    assert f"[Previous line repeated {MAX_FRAMES - 4} more times]" in trace
    assert "host.py" not in trace


def test_trace_of_a_failure_before_the_environment_is_empty() -> None:
    host = EnvHandler(EnvSettings({}, None, TEXT))
    outcome = host.call("make", ("nosuch", {}))
    assert "no environment of the name" in str(outcome.failure)
    assert outcome.trace == ""


@pytest.mark.spec("rollout.env-traceback")
def test_trace_is_logged_once_per_place(
    tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    raising = raises(ValueError("at one place"))
    failed = run(tiny_tokenizer, [{}] * 3, env_that(step=raising))
    assert [t.failure for t in failed] == [
        "environment counting: step raised ValueError: at one place"
    ] * 3
    (message,) = [r.getMessage() for r in caplog.records if "Error: at one place" in r.getMessage()
                  and "\n" in r.getMessage()]  # fmt: skip
    assert f'\n    File "{__file__}", line ' in message
    assert all(t.failure_trace.endswith("    raise error\n") for t in failed)


@pytest.mark.spec("rollout.env-traceback")
def test_place_of_a_hang_is_named(tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    try:
        (hung,) = run(tiny_tokenizer, [{}], env_that(step=lambda *_: release.wait()), timeout=0.2)
    finally:
        release.set()
    assert "step did not return within 0.2 s; it was at: File " in str(hung.failure)
    assert f'File "{__file__}", line ' in caplog.text
    assert f'File "{__file__}", line ' in hung.failure_trace


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ({"a": [1, 2.5, None, True, "x"]}, {"a": [1, 2.5, None, True, "x"]}),
        ({3: (1, 2)}, {"3": [1, 2]}),
        (with_method("__str__", lambda self: "no", str)("text"), "text"),
        (with_method("__float__", lambda self: 0.0, float)(0.5), 0.5),
    ],
)
def test_plain_data(value: Any, wanted: Any) -> None:
    found = PlainData(100).of(value)
    assert found == wanted
    assert type(found) is type(wanted)


def test_plain_data_is_limited() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    for value in (cycle, [0] * 200_000):
        with pytest.raises(ValueError, match=f"expected at most {MAX_DEPTH} levels and 100,000"):
            PlainData(100).of(value)
    with pytest.raises(ValueError, match="expected integers of at most 1024 bits"):
        PlainData(100).of([10**400])
    assert PlainData(5).of(["abc", "def", "g"]) == ["abc", "de", ""]


class WatchedTokenizer:
    """A tokenizer that records in which thread it encodes texts of which length."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.lengths: list[int] = []
        self.threads: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> Any:
        self.lengths.append(len(text))
        if len(text) > 100:  # not the engine's answer
            self.threads.add(threading.get_ident())
        return self._tokenizer.encode(text, **options)


@pytest.mark.spec("rollout.long-observation")
@pytest.mark.parametrize("context", ["append", "retemplate", "single"])
def test_long_observation_is_cut_before_it_is_tokenised_in_a_thread(
    tiny_tokenizer: Any, context: str
) -> None:
    tokenizer = WatchedTokenizer(tiny_tokenizer)
    answer = {**GOOD, "observations": "word " * 1_000_000}
    env = env_that(step=lambda *_: answer)
    options = {"context": context, "max_input_length": 300}
    (trajectory,) = run(tokenizer, [{}], env, **options)
    assert (trajectory.stop_reason, len(trajectory.steps)) == ("length", 1)
    assert len(trajectory.steps[0].observation) == TEXT
    assert max(tokenizer.lengths) < TEXT
    assert threading.get_ident() not in tokenizer.threads


@pytest.mark.spec("rollout.long-observation")
def test_prompt_that_is_not_too_long_is_not_cut(tiny_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "word " * 500}]
    whole = make_context("append", tiny_tokenizer, messages).prompt_token_ids()
    for length in (1, len(whole) // 8, len(whole) - 1, len(whole), len(whole) + 1):
        ids = make_context("append", tiny_tokenizer, messages, max_length=length).prompt_token_ids()
        assert (len(ids) > length) == (len(whole) > length)
        assert ids == whole[: len(ids)] or len(ids) > length
        if len(whole) <= length:
            assert ids == whole


def fuzz(tokenizer: Any, seeds: range) -> None:
    rows = [{"seed": seed} for seed in seeds]
    trajectories = run(tokenizer, rows, HostileEnv, max_concurrent_trajectories=64, timeout=60.0)
    assert len(trajectories) == len(seeds)
    ends = {"env_error", "stop", "max_turns", "length"}
    for trajectory in trajectories:
        assert trajectory.stop_reason in ends
        assert (trajectory.failure is not None) == (trajectory.stop_reason == "env_error")
        assert len(trajectory.failure or "") < MAX_FAILURE + 200
        plain = (trajectory.env_metrics, [step.observation for step in trajectory.steps])
        json.dumps(plain)
    ended = [trajectory.stop_reason for trajectory in trajectories]
    assert ended.count("env_error") > len(seeds) / 10
    assert ended.count("max_turns") > len(seeds) / 20


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_random_hostile_answers(tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    fuzz(tiny_tokenizer, range(300))


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_ten_thousand_hostile_answers(
    tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    started = time.monotonic()
    for start in range(0, 10_000, 1_000):
        fuzz(tiny_tokenizer, range(start, start + 1_000))
    assert time.monotonic() - started < 1_500
