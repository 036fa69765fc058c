"""Errors quote the end of a log without reading all of it."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl_fast.rollout.engine.protocol import EngineDeadError
from skyrl_fast.rollout.engine.vllm_engine import Vllm, VllmEngine
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.system.log_tail import TAIL_BYTES, log_tail
from skyrl_fast.train.parallel.local_ranks import LocalRank

HUGE = 1 << 40  # bytes; without memory on the disk


@pytest.fixture
def huge(tmp_path: Path) -> Path:
    path = tmp_path / "rank_1.log"
    path.touch()
    os.truncate(path, HUGE)
    with path.open("ab") as file:
        file.write(b"\nthe reason\xff\n")
    return path


def test_end_of_a_file(tmp_path: Path, huge: Path) -> None:
    assert log_tail(tmp_path / "none") == ""
    short = tmp_path / "short"
    short.write_text("one\ntwo\n")
    assert log_tail(short) == "one\ntwo\n"
    assert len(log_tail(huge)) == TAIL_BYTES
    assert log_tail(huge).endswith("\nthe reason\ufffd\n")


async def test_errors_quote_the_end_of_a_huge_log(huge: Path) -> None:
    def fail(setup: VllmSetup) -> Vllm:
        raise RuntimeError("it did not start")

    engine = VllmEngine(VllmSetup("model", log_file=str(huge)), start=fail)
    with pytest.raises(EngineDeadError, match="the reason"):
        await engine.start()
    process = SimpleNamespace(name="rank 1", exitcode=1)
    assert (LocalRank(process, huge).exit_message() or "").endswith("the reason\ufffd")
