"""A pool of engines: deaths, restarts with the current weights, updates of all engines."""

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from skyrl_fast.rollout.continued import generate_through_updates
from skyrl_fast.rollout.engine.pool import EnginePool, PoolSeconds
from skyrl_fast.rollout.engine.protocol import (
    Engine,
    EngineDeadError,
    EngineError,
    EngineStoppedError,
    Generation,
    NoRoomError,
    SamplingParams,
)
from skyrl_fast.rollout.engine.weights.gate import WeightGate
from skyrl_fast.rollout.engine.weights.probe import WeightProbe
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.rollout.engine.weights.transfer import WorkerCall
from skyrl_fast.rollout.stop_reason import INTERRUPTED

QUICK = PoolSeconds(poll=0.01)


class OneWeight:
    """An engine whose model is one number, the logprob of every token."""

    starts_with_model = True
    weights_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None

    def __init__(self, name: str, *, comes_back: bool = True, deaf: bool = False) -> None:
        self.name = name
        self.weight = 0.0
        self.alive = False
        self.may_come_back = comes_back
        self.deaf = deaf  # accepts weights without using them
        self.starts = 0
        self.sessions: Counter[str] = Counter()
        self.paused = False
        self.hold: asyncio.Event | None = None
        self.frozen: set[str] = set()  # of the last weights

    def check_running(self) -> None:
        if not self.alive:
            raise EngineDeadError(f"{self.name} died\nlast lines of its log")

    async def start(self) -> None:
        self.starts += 1
        if not self.may_come_back and self.starts > 1:
            raise EngineDeadError("does not start")
        self.weight, self.alive = 0.0, True

    async def close(self) -> None:
        self.alive = self.paused = False

    async def comes_back(self) -> bool:
        return self.may_come_back

    async def restart(self) -> None:
        await self.close()
        await self.start()

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
        self.check_running()
        assert not self.paused
        self.sessions[session_id] += 1
        if self.hold is not None:
            await self.hold.wait()
        self.check_running()
        return Generation([1], [self.weight], INTERRUPTED if self.paused else "stop")

    async def load_weights(self, call: WorkerCall) -> None:
        self.check_running()
        if not self.deaf:
            self.weight = float(load_file(call.arguments[0])["w"])
        self.frozen = set(call.sent.frozen)

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        self.check_running()
        assert not self.paused  # a paused engine never answers
        return [self.weight] * (len(token_ids) - 1)

    async def sleep(self) -> None:
        self.check_running()
        self.asleep = True

    async def interrupt(self) -> None:
        self.check_running()
        self.paused = True
        if self.hold is not None:
            self.hold.set()

    async def resume(self) -> None:
        self.check_running()
        self.paused = False


class Trainer:
    """A trainer with one weight, and the probe for weight syncs."""

    def __init__(self) -> None:
        self.weight = 0.0

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {"w": torch.tensor(self.weight)}

    def make_probe(self, engine: Engine) -> WeightProbe:
        return WeightProbe(
            engine,
            probe=[[1, 2]],
            trainer_logprobs=lambda probe: [([self.weight], 1.0)] * len(probe),
        )


async def test_the_trainer_computes_its_logprobs_while_engines_load() -> None:
    asked = threading.Event()

    class Loading(OneWeight):
        async def load_weights(self, call: WorkerCall) -> None:
            assert await asyncio.to_thread(asked.wait, 5)
            await super().load_weights(call)

    def trainer_logprobs(probe: list[list[int]]) -> list[tuple[list[float], float]]:
        asked.set()
        return [([trainer.weight], 1.0)] * len(probe)

    trainer = Trainer()

    pool = EnginePool([Loading("a"), Loading("b")], seconds=QUICK)  # type: ignore[list-item]
    await pool.start()
    trainer.weight = 2.0
    report = await pool.update(
        trainer.weights,
        lambda engine: WeightProbe(engine, probe=[[1, 2]], trainer_logprobs=trainer_logprobs),
    )
    assert report.difference.maximum == 0.0
    await pool.close()


async def started(
    *engines: OneWeight, max_restarts: int = 3, seconds: PoolSeconds = QUICK
) -> tuple[EnginePool, Trainer]:
    pool = EnginePool(
        engines,  # type: ignore[arg-type]
        max_restarts=max_restarts,
        seconds=seconds,
    )
    await pool.start()
    trainer = Trainer()
    await pool.verify(trainer.make_probe)
    return pool, trainer


@pytest.mark.spec("update.engine-lost")
async def test_an_engine_that_dies_before_the_first_comparison_is_left_out() -> None:
    first, second = OneWeight("a"), OneWeight("b")
    pool = EnginePool([first, second], seconds=QUICK)  # type: ignore[arg-type]
    await pool.start()
    first.alive = False
    assert (await pool.verify(Trainer().make_probe)).difference.maximum == 0
    assert [line.partition(" is down")[0] for line in pool.activity()] == ["a"]
    second.alive = False
    with pytest.raises(EngineDeadError, match="no engine is left; the first one: a died"):
        await pool.verify(Trainer().make_probe)


async def ask(pool: EnginePool, session: str) -> Generation:
    return await pool.generate([1], SamplingParams(), session_id=session, policy_version=0)


@pytest.mark.spec("async.server-sessions")
async def test_sessions_are_distributed_and_stay_on_their_engine() -> None:
    engines = [OneWeight("a"), OneWeight("b"), OneWeight("c")]
    pool, _ = await started(*engines)
    for _ in range(3):
        await asyncio.gather(*(ask(pool, f"s{i}") for i in range(60)))
    for engine in engines:
        assert 10 <= len(engine.sessions) <= 30
        assert set(engine.sessions.values()) == {3}


@pytest.mark.spec("async.server-sessions")
async def test_no_engine_idles_while_another_has_many_requests() -> None:
    engines = [OneWeight("a"), OneWeight("b")]
    pool, _ = await started(*engines)
    for number in range(40):
        await ask(pool, f"s{number}")
    assert [len(engine.sessions) for engine in engines] == [20, 20]
    first = [*engines[0].sessions]
    engines[0].hold = asyncio.Event()
    asked = [asyncio.create_task(ask(pool, session)) for session in first]
    await asyncio.sleep(0.01)
    engines[0].hold.set()
    await asyncio.gather(*asked)
    moved = [session for session in first if session in engines[1].sessions]
    assert len(moved) == 4  # the 16 that stay are not more than 2 * 4 + 8


@pytest.mark.spec("async.server-sessions")
async def test_requests_of_a_dead_engine_move_to_another() -> None:
    engines = [OneWeight("a"), OneWeight("b")]
    pool, _ = await started(*engines)
    for engine in engines:
        engine.hold = asyncio.Event()
    asked = [asyncio.create_task(ask(pool, f"s{i}")) for i in range(20)]
    await asyncio.sleep(0.01)
    lost = sum(engines[0].sessions.values())
    assert 0 < lost < 20
    engines[0].alive = False
    for engine in engines:
        engine.hold.set()
    got = await asyncio.gather(*asked)
    assert all(g.stop_reason == "stop" for g in got)
    assert sum(engines[1].sessions.values()) == 20
    assert pool.faults["engine_deaths"] == 1
    assert pool.faults["requests_sent_again"] == lost
    assert pool.activity() == ["a is down for 0 s: a died"]


async def test_dead_engine_restarts_with_the_current_weights() -> None:
    engine = OneWeight("a")
    pool, trainer = await started(engine)
    trainer.weight = 0.5
    await pool.update(trainer.weights, trainer.make_probe)
    engine.alive = False
    waiting = asyncio.create_task(ask(pool, "s"))
    await asyncio.wait_for(pool.wait_for_fault(), 5)
    assert not waiting.done()
    await pool.repair(trainer.weights, trainer.make_probe)
    got = await waiting
    assert got.logprobs == [0.5]  # not the weights it was started with
    assert engine.starts == 2
    assert pool.faults["engine_restarts"] == 1
    assert pool.activity() == []


@pytest.mark.spec("run.engines-of-a-stop")
async def test_engines_that_end_while_the_run_stops_are_not_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stopping: list[bool] = []
    one = OneWeight("a")
    other = OneWeight("b")
    pool = EnginePool(
        [one, other],  # type: ignore[list-item]
        seconds=QUICK,
        is_stopping=lambda: bool(stopping),
    )
    await pool.start()
    trainer = Trainer()
    await pool.verify(trainer.make_probe)
    stopping.append(True)
    one.alive = False
    await pool.update(trainer.weights, trainer.make_probe)  # the other one has the weights
    other.alive = False
    for work in (
        pool.update(trainer.weights, trainer.make_probe),
        pool.repair(trainer.weights, trainer.make_probe),
        pool.verify(trainer.make_probe),
    ):
        with pytest.raises(EngineStoppedError):
            await asyncio.wait_for(work, 5)
    assert [one.starts, other.starts] == [1, 1]
    assert pool.faults["engine_deaths"] == 0
    assert "DEAD" not in caplog.text


@pytest.mark.spec("sync.frozen-parts")
async def test_engines_are_told_which_parts_are_frozen() -> None:
    engine = OneWeight("a")
    pool, trainer = await started(engine)
    await pool.update(trainer.weights, trainer.make_probe, frozen=("model.visual",))
    assert engine.frozen == {"model.visual"}
    engine.alive, engine.frozen = False, set()
    await asyncio.wait_for(pool.wait_for_fault(), 5)
    await pool.repair(trainer.weights, trainer.make_probe, frozen=("model.visual",))
    assert engine.frozen == {"model.visual"}


@pytest.mark.spec("async.engine-restart")
async def test_an_engine_that_dies_without_requests_is_restarted() -> None:
    engines = [OneWeight("a"), OneWeight("b")]
    pool, trainer = await started(*engines)
    engines[1].alive = False
    await asyncio.wait_for(pool.wait_for_fault(), 5)
    assert [text.split()[0] for text in pool.activity()] == ["b"]
    await pool.repair(trainer.weights, trainer.make_probe)
    assert pool.faults == {"engine_deaths": 1, "engine_restarts": 1}
    assert [engine.starts for engine in engines] == [1, 2]


@pytest.mark.spec("gateway.engines")
async def test_engine_without_a_trainer_restarts_with_its_weights_of_the_start() -> None:
    engine = OneWeight("a")
    pool, _ = await started(engine, max_restarts=1)
    for restarts in (True, False):
        engine.alive = False
        waiting = asyncio.create_task(ask(pool, "s"))
        await asyncio.wait_for(pool.wait_for_fault(), 5)
        if restarts:
            await pool.restart()
            assert (await waiting).logprobs == [0.0]
    with pytest.raises(EngineDeadError, match="no engine is left"):
        await pool.restart()
    waiting.cancel()
    assert pool.faults["engine_restarts"] == 1


async def test_a_restarted_engine_serves_no_request_before_it_has_the_weights() -> None:
    engines = [OneWeight("a"), OneWeight("b")]
    pool, trainer = await started(*engines)
    trainer.weight = 0.5
    await pool.update(trainer.weights, trainer.make_probe)
    for engine in engines:
        engine.alive = False
    asked = [asyncio.create_task(ask(pool, f"s{i}")) for i in range(20)]
    await asyncio.wait_for(pool.wait_for_fault(), 5)
    await pool.repair(trainer.weights, trainer.make_probe)
    assert {x for g in await asyncio.gather(*asked) for x in g.logprobs} == {0.5}


async def test_engine_that_keeps_dying_is_abandoned() -> None:
    engine = OneWeight("a")
    pool, trainer = await started(engine, max_restarts=2)
    for _ in range(2):
        engine.alive = False
        waiting = asyncio.create_task(ask(pool, "s"))
        await asyncio.wait_for(pool.wait_for_fault(), 5)
        await pool.repair(trainer.weights, trainer.make_probe)
        await waiting
    engine.alive = False
    waiting = asyncio.create_task(ask(pool, "s"))
    await asyncio.wait_for(pool.wait_for_fault(), 5)
    with pytest.raises(EngineDeadError, match="no engine is left; the first one: a died"):
        await pool.repair(trainer.weights, trainer.make_probe)
    waiting.cancel()


async def test_an_update_that_it_survives_resets_the_count() -> None:
    engine = OneWeight("a")
    pool, trainer = await started(engine, max_restarts=1)
    for _ in range(4):
        engine.alive = False
        waiting = asyncio.create_task(ask(pool, "s"))
        await asyncio.wait_for(pool.wait_for_fault(), 5)
        await pool.repair(trainer.weights, trainer.make_probe)
        await waiting
        trainer.weight += 0.5
        await pool.update(trainer.weights, trainer.make_probe)
    assert engine.starts == 5


@pytest.mark.spec("async.verified-update")
async def test_update_reaches_an_engine_or_stops_the_run() -> None:
    engines = [OneWeight("a"), OneWeight("b")]
    pool, trainer = await started(*engines)
    trainer.weight = 0.25
    report = await pool.update(trainer.weights, trainer.make_probe)
    assert [engine.weight for engine in engines] == [0.25, 0.25]
    assert report.difference.maximum == 0
    engines[0].deaf = engines[1].deaf = True
    trainer.weight = 0.75
    with pytest.raises(WeightSyncError, match=r"differ from the trainer's by up to 0\.5"):
        await pool.update(trainer.weights, trainer.make_probe)


class Failing(OneWeight):
    """Raises an error in one call of an update."""

    def __init__(self, name: str, call: str, error: Exception) -> None:
        super().__init__(name)
        self.call, self.error, self.fails = call, error, False

    def fail(self, call: str) -> None:
        if self.fails and call == self.call:
            raise self.error

    async def load_weights(self, call: WorkerCall) -> None:
        self.fail("load_weights")
        await super().load_weights(call)

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        self.fail("prompt_logprobs")
        return await super().prompt_logprobs(token_ids)

    async def interrupt(self) -> None:
        self.fail("interrupt")
        await super().interrupt()

    async def resume(self) -> None:
        self.fail("resume")
        await super().resume()


@pytest.mark.spec("async.failed-update")
@pytest.mark.parametrize("call", ["load_weights", "resume", "prompt_logprobs"])
@pytest.mark.parametrize("error", [EngineError("answered 500"), WeightSyncError("wrong digest")])
async def test_an_engine_that_fails_an_update_is_left_out_until_its_restart(
    call: str, error: Exception
) -> None:
    bad, good = Failing("a", call, error), OneWeight("b")
    pool, trainer = await started(bad, good)
    bad.fails, trainer.weight = True, 0.5
    await pool.interrupt()
    await pool.update(trainer.weights, trainer.make_probe)
    got = await asyncio.gather(*(ask(pool, f"s{i}") for i in range(20)))
    assert {x for g in got for x in g.logprobs} == {0.5} and not bad.sessions
    assert pool.activity() == [f"a is down for 0 s: {error}"]
    assert pool.faults == {"engine_deaths": 1}

    bad.fails = False
    await asyncio.wait_for(pool.wait_for_fault(), 5)
    await pool.repair(trainer.weights, trainer.make_probe)
    await asyncio.gather(*(ask(pool, f"s{i}") for i in range(20)))
    assert (bad.weight, bad.paused, good.paused) == (0.5, False, False) and bad.sessions
    assert pool.activity() == []


async def test_an_engine_that_cannot_be_paused_is_restarted_by_the_update() -> None:
    bad, good = Failing("a", "interrupt", EngineError("answered 500")), OneWeight("b")
    pool, trainer = await started(bad, good)
    bad.fails, trainer.weight = True, 0.5
    await pool.interrupt()
    await pool.update(trainer.weights, trainer.make_probe)
    assert [engine.weight for engine in (bad, good)] == [0.5, 0.5]
    assert (bad.starts, bad.paused, pool.activity()) == (2, False, [])


async def test_an_update_that_all_engines_fail_ends_the_run() -> None:
    errors = EngineError("first"), WeightSyncError("second")
    engines = [Failing("a", "load_weights", error) for error in errors]
    pool, trainer = await started(*engines)
    for engine in engines:
        engine.fails = True
    with pytest.raises(EngineError, match="first"):
        await pool.update(trainer.weights, trainer.make_probe)
    assert [engine.starts for engine in engines] == [1, 1]


@pytest.mark.spec("async.failed-update")
async def test_requests_are_served_after_an_update_that_has_ended_early() -> None:
    loading = asyncio.Event()

    class NeverLoads(OneWeight):
        async def load_weights(self, call: WorkerCall) -> None:
            loading.set()
            await asyncio.Event().wait()

    pool, trainer = await started(NeverLoads("a"))
    await pool.release()
    update = asyncio.create_task(pool.update(trainer.weights, trainer.make_probe))
    await loading.wait()
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    assert (await ask(pool, "s")).stop_reason == "stop"


@pytest.mark.spec("async.failed-update")
async def test_a_released_request_that_comes_again_leaves_the_loop_to_others() -> None:
    pool, _ = await started(OneWeight("a"))
    await pool.release()  # and no update follows, as in a run that is stopped
    sampling = SamplingParams(max_generate_length=4)
    request = asyncio.create_task(
        generate_through_updates(
            pool, WeightGate(), None, [1], sampling, session_id="s", part_seed=lambda part: part
        )
    )
    async with asyncio.timeout(10):
        await asyncio.sleep(0.1)
    assert not request.done()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


@pytest.mark.spec("async.server-return")
async def test_engine_that_dies_during_an_update_does_not_block_it() -> None:
    engines = [OneWeight("a"), OneWeight("b", comes_back=False)]
    pool, trainer = await started(*engines)
    engines[1].alive = False
    trainer.weight = 0.5
    await pool.interrupt()
    await pool.update(trainer.weights, trainer.make_probe)
    assert (await ask(pool, "s")).logprobs == [0.5]
    engines[1].may_come_back = True
    trainer.weight = 0.75
    await pool.update(trainer.weights, trainer.make_probe)
    assert [engine.weight for engine in engines] == [0.75, 0.75]
    assert pool.faults == {"engine_deaths": 1, "engine_restarts": 1}


@pytest.mark.spec("async.in-flight-update")
async def test_requests_waiting_for_an_engine_do_not_block_an_update() -> None:
    engine = OneWeight("a", comes_back=False)
    pool, trainer = await started(engine)
    engine.alive = False
    waiting = asyncio.create_task(ask(pool, "s"))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await pool.interrupt()
    got = await waiting
    assert (got.token_ids, got.stop_reason) == ([], INTERRUPTED)
    engine.may_come_back = True
    trainer.weight = 0.5
    await pool.update(trainer.weights, trainer.make_probe)
    assert (await ask(pool, "s")).logprobs == [0.5]


@pytest.mark.spec("async.engine-silence")
async def test_hanging_engine_is_treated_as_dead_by_an_update() -> None:
    """It serves no requests and answers no pause, but blocks neither requests nor the update."""

    class Hangs(OneWeight):
        hangs = False

        async def interrupt(self) -> None:
            if self.hangs:
                await asyncio.Event().wait()
            await super().interrupt()

    engines = [Hangs("a"), OneWeight("b")]
    pool, trainer = await started(*engines, seconds=replace(QUICK, pause=0.5))  # of both
    for engine in engines:
        engine.hold = asyncio.Event()
    asked = [asyncio.create_task(ask(pool, f"s{i}")) for i in range(20)]
    await asyncio.sleep(0.01)
    engines[0].hangs = True
    trainer.weight = 0.5
    await pool.interrupt()
    await pool.update(trainer.weights, trainer.make_probe)
    got = await asyncio.wait_for(asyncio.gather(*asked), 5)
    assert len(got) == 20
    assert pool.faults["engine_deaths"] == pool.faults["engine_restarts"] == 1
    assert [engine.weight for engine in engines] == [0.5, 0.5]


async def test_pause_ends_when_its_engine_dies() -> None:
    """As in vLLM if its engine is killed at that moment."""

    class Silent(OneWeight):
        async def interrupt(self) -> None:
            assert self.hold is not None
            self.hold.set()
            await asyncio.Event().wait()

    engine = Silent("a")
    pool, trainer = await started(engine)
    engine.hold = asyncio.Event()
    asked = asyncio.create_task(ask(pool, "s"))
    await asyncio.sleep(0.01)
    engine.alive = False
    trainer.weight = 0.5
    await asyncio.wait_for(pool.interrupt(), 5)
    await asyncio.wait_for(pool.update(trainer.weights, trainer.make_probe), 5)
    assert (await asked).stop_reason in ("stop", INTERRUPTED)
    assert engine.weight == 0.5


async def test_cancelled_request_stays_cancelled() -> None:
    engine = OneWeight("a")
    pool, _ = await started(engine)
    engine.hold = asyncio.Event()
    asked = asyncio.create_task(ask(pool, "s"))
    await asyncio.sleep(0.01)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert pool.faults == {}


async def test_waiting_for_any_engine_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = OneWeight("a", comes_back=False)
    pool, trainer = await started(engine, seconds=replace(QUICK, log=0.05))
    engine.alive = False
    update = asyncio.create_task(pool.update(trainer.weights, trainer.make_probe))
    await asyncio.sleep(0.2)
    assert not update.done()
    engine.may_come_back = True
    await asyncio.wait_for(update, 5)
    assert "waiting for an engine. a is down for 0 s: a died" in caplog.text


class Refusing(OneWeight):
    """Answers incorrectly, from the given start on."""

    first = 1

    async def start(self) -> None:
        await super().start()
        if self.starts >= self.first:
            raise EngineError(f"{self.name} answered 404 to /v1/models")


async def test_all_engines_are_closed_if_one_does_not_start() -> None:
    one, other = OneWeight("a"), Refusing("b")
    with pytest.raises(EngineError, match="b answered 404"):
        await started(one, other)
    assert not one.alive and not other.alive


async def test_restarted_engine_that_refuses_is_abandoned_and_the_others_continue() -> None:
    one, other = OneWeight("a"), Refusing("b")
    other.first = 2
    pool, trainer = await started(one, other, max_restarts=1)
    other.alive = False
    await asyncio.gather(
        *(ask(pool, f"s{i}") for i in range(20))
    )  # some are sent to the dead engine
    for _ in range(2):  # a restart, then it is abandoned
        await asyncio.wait_for(pool.wait_for_fault(), 5)
        await pool.repair(trainer.weights, trainer.make_probe)
    assert (other.starts, pool.faults["engine_restarts"]) == (2, 0)
    assert "b answered 404" in pool.activity()[0]
    assert (await ask(pool, "s")).stop_reason == "stop"


class Roomless(OneWeight):
    """An engine for which the cluster has no room at first."""

    async def start(self) -> None:
        await super().start()
        if self.starts == 1:
            self.alive = False
            raise NoRoomError("no node with 8 GPUs free")


@pytest.mark.spec("async.engine-room")
async def test_an_engine_without_room_at_the_start_joins_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, other = OneWeight("a"), Roomless("b")
    pool, trainer = await started(one, other)
    trainer.weight = 0.5
    await pool.update(trainer.weights, trainer.make_probe)  # it has come: at once with these
    assert (one.weight, other.weight, other.starts) == (0.5, 0.5, 2)
    assert pool.activity() == [] and sorted(pool.reports) == [0, 1]
    assert "NO ROOM: b: no node with 8 GPUs free" in caplog.text
    assert "BACK: b, with the current weights" in caplog.text


def test_room_for_no_engine_is_an_error() -> None:
    one, other = Roomless("a"), Roomless("b")
    with pytest.raises(NoRoomError, match="no node with 8 GPUs free"):
        asyncio.run(started(one, other))
    assert not one.alive and not other.alive


@pytest.mark.parametrize("waits", ["for groups", "in an update"])
def test_a_run_whose_engines_stay_away_ends(waits: str) -> None:
    async def go() -> None:
        engine = OneWeight("a", comes_back=False)
        pool = EnginePool([engine], seconds=replace(QUICK, back=0.05))  # type: ignore[list-item]
        await pool.start()
        trainer = Trainer()
        engine.alive = False
        if waits == "in an update":
            await asyncio.wait_for(pool.update(trainer.weights, trainer.make_probe), 5)
        asked = asyncio.create_task(ask(pool, "s"))
        try:
            await asyncio.wait_for(pool.wait_for_fault(), 5)
        finally:
            asked.cancel()

    with pytest.raises(EngineDeadError, match=r"no engine came back within 0.05 s: a is down for"):
        asyncio.run(go())


def test_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="engines: expected at least one"):
        EnginePool([])
