"""What ends a trajectory, deadlines, failures and retries (docs/spec.md, section 3)."""

import pytest
from fake_envs import (
    Call,
    CountingEnv,
    FakePrompt,
    FlakyEnv,
    ScriptedEngine,
    loop_config,
    prompt_with,
    register_fakes,
    run,
    says,
)

from skyrl_fast.adapters.generator_output import generator_output_from_trajectories
from skyrl_fast.rollout.engine.protocol import EngineDeadError, EngineError, Generation
from skyrl_fast.rollout.failures import FailureWatch, RolloutError
from skyrl_fast.rollout.trajectory import Trajectory

register_fakes()


@pytest.fixture(autouse=True)
def forget() -> None:
    CountingEnv.closed.clear()
    FlakyEnv.failures.clear()


@pytest.mark.spec("rollout.retries")
def test_flaky_environment_is_retried(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    flaky = FakePrompt(
        "f", env_class="flaky", env_extras={"name": "f", "fail_times": 1, "turns": 1}
    )
    (t,) = run(tiny_tokenizer, [flaky], loop_config(max_retries=1), engine)
    assert (t.failure, len(t.steps)) == (None, 1)
    assert len({c.seed for c in engine.calls}) == 2  # another attempt, other seeds


def test_one_broken_environment_of_64_does_not_stop_the_step(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    prompts = [
        FakePrompt(f"p{i}", env_extras={"turns": 2, **({"raise_at": 2} if i == 17 else {})})
        for i in range(64)
    ]
    got = run(tiny_tokenizer, prompts, loop_config(max_turns=2, max_retries=2), engine)
    failed = [t for t in got if t.failure]
    assert [t.uid for t in failed] == ["p17"]
    assert "counting: step raised RuntimeError: the database is locked" in failed[0].failure
    assert failed[0].stop_reason == failed[0].steps[-1].stop_reason == "env_error"
    rows = generator_output_from_trajectories(got)
    assert len(rows["rewards"]) == 63 * 2 + 1  # the failed one is one masked placeholder row
    assert rows["loss_masks"][17 * 2] == []
    assert rows["rollout_metrics"]["generate/num_failed_trajectories"] == 1.0
    assert len(CountingEnv.closed) == 64 + 2  # each attempt's environment was closed


def test_hanging_call_is_an_environment_error_and_other_trajectories_finish(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    hanging = FakePrompt("h", env_extras={"turns": 2, "hang_at": 1, "hang_seconds": 3.0})
    prompts = [hanging, *[FakePrompt(f"p{i}", env_extras={"turns": 1}) for i in range(6)]]
    config = loop_config(max_turns=2, max_retries=1)
    got = run(tiny_tokenizer, prompts, config, engine, timeout=0.5, workers=2)
    assert (got[0].stop_reason, got[0].steps) == ("env_error", [])
    assert "step did not return within 0.5 s" in got[0].failure
    assert all(t.failure is None for t in got[1:])


@pytest.mark.parametrize(
    ("extras", "failure"),
    [
        ({"raise_at": 2}, "step raised RuntimeError: the database is locked"),
        ({"odd_at": 2, "odd_answer": {"reward": 1.0}}, "the answer lacks observations, done"),
        ({"messages": [{"role": "judge", "content": ""}]}, "the chat template refuses messages"),
    ],
)
def test_environment_errors(tiny_tokenizer, extras: dict, failure: str) -> None:
    refusing = "{% if messages[-1]['role'] == 'judge' %}{{ raise_exception('who?') }}{% endif %}"
    config = loop_config(
        max_turns=3, max_retries=0, chat_template=refusing + tiny_tokenizer.chat_template
    )
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    (t,) = run(tiny_tokenizer, [prompt_with(**extras)], config, engine)
    assert failure in t.failure
    assert [s.stop_reason for s in t.steps] == ["env_error"]
    assert t.stop_reason == "env_error"
    rows = generator_output_from_trajectories([t])
    assert (rows["response_ids"], rows["stop_reasons"]) == ([[]], ["env_error"])
    assert CountingEnv.closed == [""]


@pytest.mark.spec("rollout.request-seed")
def test_error_after_some_steps_restarts_with_other_seeds(tiny_tokenizer) -> None:
    def answer(call: Call, n: int) -> Generation | Exception:
        return EngineError("refused") if n == 2 else says(tiny_tokenizer, f"a{n}")

    engine = ScriptedEngine(answer)
    (t,) = run(tiny_tokenizer, [prompt_with(turns=3)], loop_config(max_turns=3), engine)
    assert (t.failure, t.stop_reason) == (None, "stop")
    assert [s.text for s in t.steps] == ["a3", "a4", "a5"]  # no steps of the first attempt
    assert [c.session_id[-2:] for c in engine.calls] == ["-0"] * 3 + ["-1"] * 3
    assert len({c.seed for c in engine.calls}) == 6
    assert CountingEnv.closed == ["", ""]


# --- deadlines ---------------------------------------------------------------------------------


@pytest.mark.spec("rollout.timeout")
def test_trajectory_keeps_its_steps_at_the_deadline(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: None if n == 2 else says(tiny_tokenizer, "a"))
    config = loop_config(max_turns=9, max_retries=3, trajectory_timeout_seconds=0.3)
    (t,) = run(tiny_tokenizer, [prompt_with(turns=9)], config, engine)
    assert (t.stop_reason, t.failure, len(engine.calls)) == ("timeout", None, 3)
    assert [s.stop_reason for s in t.steps] == ["stop", "timeout"]
    assert t.env_metrics == {"turns": 2, "last_action": "a"}
    assert CountingEnv.closed == [""]
    rows = generator_output_from_trajectories([t])
    assert rows["loss_masks"] == [[1, 1], [1, 1]]
    assert rows["rewards"] == [1.0, 2.0]
    assert rows["stop_reasons"] == ["stop", "timeout"]
    assert rows["rollout_metrics"]["generate/num_failed_trajectories"] == 0.0


@pytest.mark.spec("rollout.timeout", "rollout.env-closed")
def test_deadline_during_an_environment_call_drops_that_turn(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    slow = FakePrompt("slow", env_extras={"turns": 9, "hang_at": 2, "hang_seconds": 1.0})
    fast = FakePrompt("fast", env_extras={"turns": 1})
    config = loop_config(max_turns=9, max_retries=0, trajectory_timeout_seconds=0.3)
    got = run(tiny_tokenizer, [slow, fast], config, engine)
    assert (got[0].stop_reason, got[0].failure, len(got[0].steps)) == ("timeout", None, 1)
    assert got[0].steps[-1].stop_reason == "timeout"
    assert got[0].env_metrics == {}  # the call is still running, so metrics are not requested
    assert (got[1].stop_reason, got[1].failure) == ("stop", None)
    assert len(CountingEnv.closed) == 2


@pytest.mark.spec("rollout.deadline-before-first-step")
def test_deadline_before_the_first_step_is_a_failure_without_retry(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: None)
    config = loop_config(max_turns=9, max_retries=5, trajectory_timeout_seconds=0.2)
    (t,) = run(tiny_tokenizer, [prompt_with(turns=9)], config, engine)
    assert (t.stop_reason, t.steps, len(engine.calls)) == ("timeout", [], 1)
    assert "turn 1 of attempt 1 did not finish within 0.2 s, the deadline" in t.failure
    assert generator_output_from_trajectories([t])["loss_masks"] == [[]]
    assert CountingEnv.closed == [""]


@pytest.mark.spec("rollout.deadline-before-first-step")
def test_deadline_covers_all_attempts(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: EngineError("refused") if n == 0 else None)
    config = loop_config(max_turns=9, max_retries=5, trajectory_timeout_seconds=0.3)
    (t,) = run(tiny_tokenizer, [prompt_with(turns=9)], config, engine)
    assert len(engine.calls) == 2
    assert "turn 1 of attempt 2" in t.failure
    assert 0.3 <= t.seconds < 5.0  # well below a second deadline; machines may pause


@pytest.mark.spec("rollout.engine-error")
@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (EngineError("refused"), "refused"),
        (TimeoutError("no answer from the server"), "TimeoutError: no answer from the server"),
        (Generation([], [], "stop"), "the engine returned no tokens"),
        (Generation([1, 2], [-1.0], "stop"), "2 tokens but 1 logprobs"),
        (Generation([1], [-1.0], "stop", kept_ids=[]), "1 tokens but 0 sets of kept tokens"),
    ],
)
def test_engine_errors(tiny_tokenizer, answer: Generation | Exception, failure: str) -> None:
    engine = ScriptedEngine(lambda call, n: answer)
    (t,) = run(tiny_tokenizer, [prompt_with(turns=1)], loop_config(max_retries=1), engine)
    assert t.stop_reason == "engine_error"
    assert failure in t.failure
    assert len(engine.calls) == 2  # retried


def test_exception_in_metrics_loses_only_the_metrics(tiny_tokenizer, caplog) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    (t,) = run(tiny_tokenizer, [prompt_with(turns=1, odd_metrics=True)], loop_config(), engine)
    assert (t.failure, t.env_metrics, len(t.steps)) == (None, {}, 1)
    assert "metrics raised KeyError" in caplog.text


# --- isolation of failures -----------------------------------------------------------------------


def test_failed_request_fails_only_its_trajectory(tiny_tokenizer) -> None:
    def answer(call: Call, n: int) -> Generation | Exception:
        return EngineError("refused") if "-bad-" in call.session_id else says(tiny_tokenizer, "a")

    got = run(
        tiny_tokenizer,
        [FakePrompt(uid, env_extras={"turns": 1}) for uid in ("good", "bad")],
        loop_config(),
        ScriptedEngine(answer),
    )
    assert [t.stop_reason for t in got] == ["stop", "engine_error"]


@pytest.mark.spec("rollout.engine-gone")
def test_dead_engine_ends_the_rollout(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: EngineDeadError("gone"))
    with pytest.raises(EngineDeadError, match="gone"):
        run(tiny_tokenizer, [FakePrompt("a"), FakePrompt("b")], loop_config(), engine)


def test_a_batch_of_failures_is_placeholder_rows_and_a_warning(tiny_tokenizer, caplog) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    prompts = [FakePrompt(f"p{i}", env_class="typo") for i in range(7)]
    got = run(tiny_tokenizer, prompts, loop_config(), engine)
    assert [t.stop_reason for t in got] == ["env_error"] * 7
    assert "NOTHING TO TRAIN IN THIS BATCH: 7 of 7 trajectories failed" in caplog.text
    assert "p0/0: environment typo: make raised ValueError: no environment" in caplog.text
    assert "and 2 more" in caplog.text
    rows = generator_output_from_trajectories(got)
    assert rows["loss_masks"] == [[]] * 7
    assert rows["rollout_metrics"]["generate/num_failed_trajectories"] == 7.0


def trajectories(*failures: str | None) -> list[Trajectory]:
    return [
        Trajectory(f"p{i}", 0, [], "env_error", "x", {}, 0.0, failure=f)
        for i, f in enumerate(failures)
    ]


@pytest.mark.spec("rollout.same-exception")
def test_one_exception_in_all_trajectories_ends_the_run_at_once() -> None:
    same = [f"environment guess: step raised KeyError: {key!r}" for key in ("a", "b")]
    other = "environment guess: init raised KeyError: 'a'"
    watch = FailureWatch()
    for failures in ([same[0]], [*same, other], [*same, None], [*same, "timeout"]):
        watch.see(trajectories(*failures))
        watch.see(trajectories(None))
    with pytest.raises(RolloutError, match=r"batch, 2, failed by the same exception.*KeyError: 'a"):
        watch.see(trajectories(*same))


@pytest.mark.spec("rollout.all-failed")
def test_three_consecutive_batches_of_failures_end_the_run() -> None:
    watch = FailureWatch()
    full, part = trajectories("no such table", "b"), trajectories("a", None)
    for batch in (full, full, part, full, [], full, full):
        watch.see(batch)
    with pytest.raises(RolloutError, match=r"3 batches in a row failed.*\(p0\): no such table"):
        watch.see(full)
