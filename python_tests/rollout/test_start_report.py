"""What is said while an engine starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

import skyrl_fast
from skyrl_fast.config import Config, as_config
from skyrl_fast.rollout.engine.from_settings import describe_start
from skyrl_fast.rollout.engine.protocol import EngineDeadError
from skyrl_fast.rollout.engine.remote import find_silent_servers
from skyrl_fast.rollout.engine.start_report import MAX_LINE, REPORT_SECONDS, report_start
from skyrl_fast.rollout.engine.vllm_engine import LOG_TAIL_LINES, Vllm, VllmEngine
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.train import SetupError
from skyrl_fast.train.flow.vllm_rollouts import check_parsers_and_servers


class FakeTime:
    """A clock that `wait` advances, as many times as there are actions, which it calls."""

    def __init__(self, *actions: Callable[[], object]) -> None:
        self.now = 100.0
        self._actions = list(actions)

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        if not self._actions:
            return True
        self._actions.pop(0)()
        return False


def nothing() -> None:
    pass


@pytest.mark.spec("run.engine-start")
def test_a_start_says_where_its_log_is_and_the_last_line_of_it(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("of an earlier run\n")
    lines: list[str] = []

    def write(text: str) -> Callable[[], object]:
        def act() -> None:
            with log.open("a") as file:
                file.write(text)

        return act

    time = FakeTime(
        nothing,
        write("first\nloading shard 1\n\n"),
        nothing,
        write("evil\x1b[2J\n"),
    )
    with report_start("vLLM starts", log, lines.append, clock=time.clock, wait=time.wait):
        pass
    assert REPORT_SECONDS == 15
    assert lines == [
        "engine: vLLM starts",
        "engine: still starting, 15 s",
        "engine: still starting, 30 s, last line of its log: loading shard 1",
        "engine: still starting, 45 s",
        "engine: still starting, 60 s, last line of its log: evil\\x1b[2J",
        "engine: ready after 75 s",
    ]


def test_a_start_without_a_log_and_a_long_line(tmp_path: Path) -> None:
    lines: list[str] = []
    time = FakeTime(nothing)
    with report_start("connecting", None, lines.append, clock=time.clock, wait=time.wait):
        pass
    assert lines[1] == "engine: still starting, 15 s"
    log = tmp_path / "engine.log"
    time = FakeTime(lambda: log.write_text("x" * 5000))
    lines.clear()
    with report_start("starts", log, lines.append, clock=time.clock, wait=time.wait):
        pass
    assert lines[1].endswith(f"{'x' * MAX_LINE} ... ({5000 - MAX_LINE} more characters)")


def test_a_start_that_fails_is_not_ready() -> None:
    lines: list[str] = []
    with pytest.raises(ValueError, match="no weights"), report_start("starts", None, lines.append):
        raise ValueError("no weights")
    assert lines == ["engine: starts"]


@pytest.mark.spec("run.engine-start")
async def test_the_error_of_a_start_that_fails_ends_with_the_last_lines_of_the_log(
    tmp_path: Path,
) -> None:
    log = tmp_path / "engine.log"

    def start(setup: VllmSetup) -> Vllm:
        lines = [f"line {number}\n" for number in range(2 * LOG_TAIL_LINES)]
        log.write_text("".join(lines))  # as its processes do
        raise RuntimeError("Engine core initialization failed")

    engine = VllmEngine(VllmSetup("models/m", log_file=str(log)), start=start)
    with pytest.raises(EngineDeadError) as caught:
        await engine.start()
    first, second, *quoted = str(caught.value).splitlines()
    assert first == (
        "the vLLM engine for models/m did not start: RuntimeError: Engine core initialization "
        "failed"
    )
    assert second == f"last lines of {log}:"
    assert quoted == [f"line {n}" for n in range(LOG_TAIL_LINES, 2 * LOG_TAIL_LINES)]


@pytest.mark.spec("run.engine-start")
async def test_so_does_that_of_workers_that_fail_once_it_runs(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("the worker's reason\n")

    async def fail(name: str) -> None:
        raise RuntimeError("a worker died")

    llm = SimpleNamespace(
        vllm_config=None,
        model_config=SimpleNamespace(get_vocab_size=lambda: 8),
        collective_rpc=fail,
        errored=True,
        shutdown=lambda seconds: None,
    )

    def start(setup: VllmSetup) -> Vllm:
        refusals = (TypeError,)
        return Vllm(llm, dict, dict, None, refusals, RuntimeError)

    engine = VllmEngine(VllmSetup("models/m", log_file=str(log)), start=start)
    with pytest.raises(
        EngineDeadError, match="did not start: RuntimeError: a worker died"
    ) as caught:
        await engine.start()
    assert str(caught.value).endswith(f"last lines of {log}:\nthe worker's reason")


def config(**engine: object) -> Config:
    return as_config({"generator.inference_engine": engine, "trainer.run_path": "runs/x"})


def test_what_starts_is_said_by_place() -> None:
    begin, log = describe_start(config(), "models/m")
    assert log == Path("runs/x/engine.log")
    assert begin == "vLLM starts and loads models/m; its log: runs/x/engine.log"
    urls = ["http://a:1", "http://b:2"]
    servers = config(external_server_urls=urls)
    assert describe_start(servers, "m") == ("connecting to http://a:1, http://b:2", None)


def test_servers_that_cannot_be_reached_are_found() -> None:
    def reply(request: httpx.Request) -> httpx.Response:
        if request.url.port == 1:
            raise httpx.ConnectError("All connection attempts failed")
        return httpx.Response(404)

    urls = ["http://a:1", "http://b:2"]
    silent = find_silent_servers(urls, httpx.MockTransport(reply))
    assert silent == {"http://a:1": "ConnectError: All connection attempts failed"}
    assert find_silent_servers([]) == {}


@pytest.mark.spec("run.parsers-and-servers")
def test_a_dead_server_and_a_misspelled_parser_are_named_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    address = "http://127.0.0.1:9"
    with caplog.at_level(logging.WARNING):
        check_parsers_and_servers(config(external_server_urls=[address]))
    (record,) = caplog.records
    setting = "generator.inference_engine.external_server_urls"
    assert record.getMessage().startswith(f"{setting}: {address} cannot be reached (ConnectError")
    settings = {"data.train_data": ["nowhere.jsonl"], "generator.tool_parser": "hermess"}
    given = {**settings, "trainer.policy.model.path": "org/none"}
    with pytest.raises(SetupError, match=r"tool_parser: expected null .*did you mean 'hermes'\?"):
        skyrl_fast.train_agent(given)
