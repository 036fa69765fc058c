"""Weight updates: the transfer file, and the verification of the engine's weights."""

import asyncio
import math
import os
import signal
import stat
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from _weights import update_engine
from safetensors.torch import load_file

from skyrl_fast.rollout.engine.weights.probe import LIMITS, Logprobs, ProbeDifference, WeightProbe
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.rollout.engine.weights.transfer import WorkerCall
from skyrl_fast.rollout.engine.weights.transports.file import WeightPlaces, send_by_file
from skyrl_fast.system import temporary_folder

PROBE = [[1, 2, 3], [4, 5]]


class OneNumberModel:
    """A model whose logprobs are its single weight plus the token id / 100."""

    logit_std = 2.0

    def __init__(self, weight: float = -2.0) -> None:
        self.weight = weight

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[self.weight + token / 100 for token in s[1:]] for s in sequences]

    def scaled_logprobs(
        self, sequences: Sequence[Sequence[int]]
    ) -> list[tuple[list[float], float]]:
        return [(values, self.logit_std) for values in self.logprobs(sequences)]


class FakeEngine(OneNumberModel):
    """An engine that applies updates, or ignores them."""

    ignores_updates = False
    compute_dtype: torch.dtype | None = None
    weights_dtype: torch.dtype | None = None
    routes: Callable[[Sequence[int]], np.ndarray]

    async def resume(self) -> None: ...

    async def load_weights(self, call: WorkerCall) -> None:
        if not self.ignores_updates:
            self.weight = float(load_file(call.arguments[0])["w"])

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return self.logprobs([token_ids])[0]

    async def prompt_routes(self, token_ids: Sequence[int]) -> tuple[list[float], np.ndarray]:
        return self.logprobs([token_ids])[0], self.routes(token_ids)


def make(trainer: OneNumberModel, engine: FakeEngine) -> WeightProbe:
    return WeightProbe(engine, probe=PROBE, trainer_logprobs=trainer.scaled_logprobs)


def push(probe: WeightProbe, trainer: OneNumberModel, change: float):
    trainer.weight += change
    return asyncio.run(
        update_engine(probe.engine, probe, {"w": torch.tensor(trainer.weight, dtype=torch.float64)})
    )


def test_effective_update_is_reported() -> None:
    trainer, engine = OneNumberModel(), FakeEngine()
    probe = make(trainer, engine)
    assert asyncio.run(probe.verify()).difference.maximum == 0.0
    report = push(probe, trainer, 0.25)
    assert (report.difference.maximum, report.difference.mean) == (0.0, 0.0)
    assert report.max_change == pytest.approx(0.25)
    assert report.update_seconds > 0.0


@pytest.mark.spec("replay.weight-probe")
def test_mixture_of_experts_is_compared_at_engine_routes() -> None:
    """Near a tie both sides may choose different experts with equal weights."""
    trainer, engine = OneNumberModel(), FakeEngine()
    engine.routes = lambda ids: np.full((len(ids), 1, 1), 3, np.uint8)
    seen = []

    def replayed(probe: list[list[int]], routes: list[np.ndarray]) -> Logprobs:
        seen.append(
            [(len(ids), r.shape, int(r.max())) for ids, r in zip(probe, routes, strict=True)]
        )
        return trainer.scaled_logprobs(probe)

    def free(probe: list[list[int]]) -> Logprobs:
        raise AssertionError("free routing was asked for")

    probe = WeightProbe(engine, probe=PROBE, trainer_logprobs=free, replayed_logprobs=replayed)
    assert asyncio.run(probe.verify()).difference.maximum == 0.0
    assert seen == [[(3, (3, 1, 1), 3), (2, (2, 1, 1), 3)]]
    engine.ignores_updates = True
    with pytest.raises(WeightSyncError, match=r"up to 0\.5"):
        push(probe, trainer, 0.5)


def test_ignored_update_error_says_where_and_why() -> None:
    trainer, engine = OneNumberModel(), FakeEngine()
    probe = make(trainer, engine)
    asyncio.run(probe.verify())
    engine.ignores_updates = True
    with pytest.raises(WeightSyncError) as caught:
        push(probe, trainer, 0.5)
    text = str(caught.value)
    assert "up to 0.5 (maximum 0.5, allowed 0.001)" in text
    assert "token" in text and "engine -1.98" in text and "trainer -1.48" in text
    assert "cannot be reloaded" in text


def test_a_model_that_the_engine_computes_otherwise_is_named_before_an_update() -> None:
    trainer, engine = OneNumberModel(), FakeEngine()
    trainer.weight += 0.5
    with pytest.raises(
        WeightSyncError, match=r"^before any update the engine's logprobs"
    ) as caught:
        asyncio.run(make(trainer, engine).verify())
    assert "computes another model of this type" in str(caught.value)
    assert "cannot be reloaded" not in str(caught.value)


@pytest.mark.spec("sync.standstill")
def test_ignored_update_smaller_than_the_tolerance_is_detected() -> None:
    trainer, engine = OneNumberModel(), FakeEngine()
    probe = make(trainer, engine)
    asyncio.run(probe.verify())
    engine.ignores_updates = True
    with pytest.raises(WeightSyncError, match="did not change in an update"):
        push(probe, trainer, 5e-5)


def test_learning_rate_zero_is_not_an_error() -> None:
    trainer, engine = OneNumberModel(), FakeEngine()
    probe = make(trainer, engine)
    asyncio.run(probe.verify())
    assert push(probe, trainer, 0.0).max_change == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_are_a_mismatch(bad: float) -> None:
    trainer, engine = OneNumberModel(), FakeEngine()
    trainer.weight = bad
    with pytest.raises(WeightSyncError, match="up to inf"):
        asyncio.run(make(trainer, engine).verify())


@pytest.mark.spec("sync.divergence")
@pytest.mark.parametrize("weight", [-1e6, math.nan])
def test_a_policy_without_sense_has_diverged(weight: float) -> None:
    trainer, engine = OneNumberModel(), FakeEngine()
    probe = make(trainer, engine)
    asyncio.run(probe.verify())
    engine.ignores_updates = True
    with pytest.raises(WeightSyncError, match=r"Training has diverged: .*lr") as caught:
        push(probe, trainer, weight)
    assert "state dict" not in str(caught.value)


def test_probe_and_callback_are_validated() -> None:
    engine = FakeEngine()
    with pytest.raises(ValueError, match="at least 2 tokens"):
        WeightProbe(engine, probe=[[1]], trainer_logprobs=engine.scaled_logprobs)
    with pytest.raises(ValueError, match="at least 2 tokens"):
        WeightProbe(engine, probe=[], trainer_logprobs=engine.scaled_logprobs)
    wrong = WeightProbe(engine, probe=PROBE, trainer_logprobs=lambda probe: [([0.0], 1.0)] * 2)
    with pytest.raises(
        ValueError, match=r"expected \[2, 1\] values per probe sequence, got \[1, 1\]"
    ):
        asyncio.run(wrong.verify())


@pytest.mark.spec("sync.standstill")
def test_standstill_of_a_bfloat16_engine_is_measured_in_units_of_the_logits() -> None:
    trainer, engine = OneNumberModel(), FakeEngine()
    probe = WeightProbe(
        engine, probe=PROBE, trainer_logprobs=trainer.scaled_logprobs, dtype=torch.bfloat16
    )
    asyncio.run(probe.verify())
    engine.ignores_updates = True
    push(probe, trainer, 0.0019)  # 2 % of 0.05 of 2.0 is 0.002
    with pytest.raises(WeightSyncError, match="did not change in an update"):
        push(probe, trainer, 0.0002)  # the changes of several updates add up


@pytest.mark.spec("sync.dtype")
def test_engine_of_another_dtype_is_refused() -> None:
    trainer, engine = OneNumberModel(), FakeEngine()
    probe = WeightProbe(
        engine, probe=PROBE, trainer_logprobs=trainer.scaled_logprobs, dtype=torch.bfloat16
    )
    engine.compute_dtype = torch.bfloat16
    asyncio.run(probe.verify())
    engine.compute_dtype = torch.float16
    with pytest.raises(WeightSyncError, match="computes in float16, expected bfloat16"):
        asyncio.run(probe.verify())


@pytest.mark.spec("sync.probe-limits")
def test_limits_are_in_units_of_the_logits_and_ignore_single_outliers() -> None:
    difference = ProbeDifference.of([0.0] * 89 + [0.3] + [2.0] * 10, 4.0)
    assert (difference.maximum, difference.quantile) == (2.0, 2.0)
    assert difference.mean == pytest.approx(0.203)
    limits = LIMITS[torch.bfloat16]
    assert not limits.allow(difference)  # quantile 2.0 of 0.4
    assert limits.allow(ProbeDifference(9.0, 0.2, 0.4, 4.0))
    assert not limits.allow(ProbeDifference(9.0, 0.21, 0.4, 4.0))
    assert not limits.allow(ProbeDifference(9.0, 0.2, 0.41, 4.0))
    assert not limits.allow(ProbeDifference.of([0.0, math.inf], 4.0))
    assert not limits.allow(ProbeDifference(0.0, 0.0, 0.0, math.nan))
    assert limits.allow(ProbeDifference(1e-6, 1e-6, 1e-6, 0.0))  # equal logits still round


def test_float32_keeps_a_limit_on_every_token() -> None:
    limits = LIMITS[torch.float32]
    assert limits.allow(ProbeDifference(1e-3, 1e-3, 1e-3, 1.0))
    assert not limits.allow(ProbeDifference(1.1e-3, 1e-6, 1e-6, 100.0))


def test_weights_file_is_private_and_deleted_after_use() -> None:
    weight = torch.randn(3, 4)
    tensors = {"a": weight, "tied": weight, "b": weight.t(), "c": weight.bfloat16()}
    with send_by_file(tensors) as call:
        path = Path(call.arguments[0])
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        loaded = load_file(path)
        assert sorted(loaded) == ["a", "b", "c"]
        assert torch.equal(loaded["a"], weight)
        assert torch.equal(loaded["b"], weight.t())
        assert loaded["c"].dtype == torch.bfloat16
    assert not path.exists()
    assert not path.parent.exists()


def test_next_update_deletes_the_files_of_a_killed_process(tmp_path: Path) -> None:
    send = partial(send_by_file, {"a": torch.zeros(3)}, folder=str(tmp_path))
    child = os.fork()
    if child == 0:
        with suppress(BaseException), send():
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    (left,) = tmp_path.iterdir()
    (tmp_path / "skyrl_fast-weights-link").symlink_to(tmp_path.parent)  # never followed
    with send() as one, send() as other:
        assert not left.exists()
        assert all(Path(call.arguments[0]).exists() for call in (one, other))  # in use
    assert [path.name for path in tmp_path.iterdir()] == ["skyrl_fast-weights-link"]


@pytest.mark.spec("run.own-files")
def test_names_of_other_users_are_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "skyrl_fast-weights-fifo")  # opening it would wait for ever
    (tmp_path / "skyrl_fast-weights-file").write_text("")
    folder = tmp_path / "skyrl_fast-weights-folder"
    folder.mkdir()
    arguments = (tmp_path, "skyrl_fast-weights-", folder.stat().st_uid + 1)
    clean = threading.Thread(target=temporary_folder.remove_stale_folders, args=arguments)
    clean.daemon = True
    clean.start()
    clean.join(10.0)
    assert not clean.is_alive()
    assert len(list(tmp_path.iterdir())) == 3


def test_no_weights_and_no_space_are_errors() -> None:
    with pytest.raises(WeightSyncError, match="no weights"):
        send_by_file({}).__enter__()
    full = WeightPlaces(free_bytes=lambda folder: 10)
    with pytest.raises(WeightSyncError, match="no room to hand over 48 bytes"):
        send_by_file({"a": torch.zeros(3, 4)}, places=full).__enter__()


def test_temporary_folder_is_used_without_shared_memory(tmp_path: Path) -> None:
    places = WeightPlaces(shared_memory=tmp_path / "absent", temporary=tmp_path)
    with send_by_file({"a": torch.zeros(3)}, places=places) as call:
        assert Path(call.arguments[0]).is_relative_to(tmp_path)
