"""Text of models and environments on the terminal and in logs."""

import logging

import pytest
from _fakes import FakeTokenizer

from skyrl_fast.rollout.failures import FailureWatch, RolloutError, log_failures
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.rollout.trajectory_runner import end_trajectory
from skyrl_fast.system.printable import (
    MAX_FAILURE,
    MAX_LOGGED,
    PrintableFormatter,
    log_line,
    printable,
)
from skyrl_fast.trajectory_store.words import MAX_SHOWN, readable

pytestmark = pytest.mark.spec("run.printable-text")

SCREEN = "\x1b[2J\x1b[H\x1b]52;c;cm0gLXJm\x07\rfake\x08\x9b31m\u202egnp\u2028\ud800"
ESCAPED = r"\x1b[2J\x1b[H\x1b]52;c;cm0gLXJm\x07\rfake\x08\x9b31m\u202egnp\u2028\ud800"


def trajectory(text: str, failure: str | None = None) -> Trajectory:
    step = Step(
        prompt_token_ids=[1],
        response_ids=[2],
        loss_mask=[1],
        rollout_logprobs=[0.0],
        reward=1.0,
        stop_reason="stop",
        policy_version=0,
        text=text,
        observation=text,
        llm_seconds=0.0,
        env_seconds=0.0,
    )
    return Trajectory("7", 0, [step], "stop", "env", {}, 0.0, failure=failure)


def test_every_control_character_is_escaped() -> None:
    controls = [chr(i) for i in (*range(32), *range(0x7F, 0xA0)) if chr(i) not in "\n\t"]
    for character in controls:
        assert printable(f"a{character}b").isprintable()
    assert printable(SCREEN) == ESCAPED
    kept = "line\n\ttab, déjà vu 日本 😀"
    assert printable(kept) == kept


def test_sample_at_the_end_of_a_run_is_escaped_and_cut() -> None:
    shown = readable(trajectory(SCREEN), tokenizer=FakeTokenizer())
    assert shown.count(ESCAPED) == 2
    assert not set(shown) & set("\x1b\r\x07\x08")
    long = readable(trajectory("x" * 10_000_000), tokenizer=FakeTokenizer())
    assert len(long) < 3 * MAX_SHOWN
    assert f"x ... ({10_000_000 - MAX_SHOWN} more characters)" in long


def test_failure_in_the_log_is_one_short_printable_line(caplog: pytest.LogCaptureFixture) -> None:
    failed = trajectory("", failure=f"{SCREEN}\nforged: line" + "x" * 10_000_000)
    log_failures([failed, trajectory("")])
    line = caplog.records[-1].getMessage()
    assert line.startswith(f"  7/0: {ESCAPED}\\nforged: line")
    assert line.isprintable() and len(line) < 2 * MAX_LOGGED
    watch = FailureWatch()
    watch.see([failed])
    watch.see([failed])
    with pytest.raises(RolloutError) as error:
        watch.see([failed])
    assert str(error.value).isprintable() and len(str(error.value)) < 2 * MAX_LOGGED


def test_failure_that_a_trajectory_keeps_is_cut() -> None:
    failed = trajectory("")
    end_trajectory(failed, "env_error", "x" * 10_000_000)
    assert (
        failed.failure == "x" * MAX_FAILURE + f" ... ({10_000_000 - MAX_FAILURE} more characters)"
    )


def test_traceback_in_the_log_is_printable() -> None:
    try:
        raise RuntimeError(SCREEN)
    except RuntimeError as error:
        about = (RuntimeError, error, error.__traceback__)
    record = logging.LogRecord("n", logging.ERROR, "f", 1, "%s", (SCREEN,), about)
    text = PrintableFormatter("%(message)s").format(record)
    assert text.startswith(ESCAPED + "\nTraceback")
    assert f"RuntimeError: {ESCAPED}" in text
    assert log_line("a\nb\x00") == r"a\nb\x00"
