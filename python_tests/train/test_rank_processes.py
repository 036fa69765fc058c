"""Rank processes: calls, faults, exits; a full run of two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import torch.distributed as dist
from _listening import LOOPBACK, listening
from _rank_probe import Probe, fail, with_a_thread
from _training import folder as folder
from _training import settings, steady, train

from skyrl_fast.system.network_interface import interface_to
from skyrl_fast.train.parallel import rank_processes
from skyrl_fast.train.parallel.local_ranks import LocalRanks
from skyrl_fast.train.parallel.rank_processes import start_ranks
from skyrl_fast.train.parallel.ranks import RankError, Ranks


@pytest.fixture
def probe(tmp_path: Path) -> Iterator[Probe]:
    with start_ranks(2, Probe, cuda=False, starter=LocalRanks(tmp_path)) as ranks:
        yield Probe(ranks)


def gone(process: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_call_reaches_all_ranks(tmp_path: Path) -> None:
    with start_ranks(2, Probe, cuda=False, starter=LocalRanks(tmp_path)) as ranks:
        probe = Probe(ranks)
        first, other = probe.processes()
        assert first == os.getpid() != other
        view = torch.arange(1000)[::10].bool()
        found = probe.echo({"view": view, "none": None}, of=probe)
        assert [(rank, mine) for rank, _, mine in found] == [(0, True), (1, True)]
        assert all(torch.equal(value["view"], view) for _, value, _ in found)
        nested = "processes: called by another run_on_all_ranks function"
        with pytest.raises(RuntimeError, match=nested):
            probe.nested()
    assert gone(other)


@pytest.mark.spec("update.rank-exit")
def test_exception_on_a_rank_ends_the_call_with_its_reason(probe: Probe) -> None:
    other = probe.processes()[1]
    with pytest.raises(RankError, match=r"rank 1 exited with code 1; .*a fault of rank 1"):
        probe.fault_on(1)
    with pytest.raises(RankError, match="a fault of rank 1"):  # nothing waits for it any more
        probe.processes()
    assert gone(other)


@pytest.mark.spec("update.rank-exit")
def test_rank_that_is_killed_is_named(probe: Probe) -> None:
    os.kill(probe.processes()[1], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 exited with code -9"):
        probe.processes()


@pytest.mark.slow
def test_rank_that_exits_while_idle_is_named_by_the_next_call(
    probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "HANG_SECONDS", 0.2)
    monkeypatch.setattr(rank_processes, "WATCH_SECONDS", 0.1)
    other = probe.processes()[1]
    os.kill(other, signal.SIGKILL)
    assert gone(other)
    time.sleep(1.0)  # else rank 0 would be gone by now
    with pytest.raises(RankError, match="rank 1 exited with code -9"):
        probe.processes()


@pytest.mark.spec("update.rank-network")
def test_ranks_listen_on_loopback_only(probe: Probe) -> None:
    for process in probe.processes():
        assert listening(process) == {LOOPBACK}


def test_interface_to_an_address() -> None:
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("127.1.2.3") == "lo"


@pytest.mark.slow
def test_an_error_of_rank_0_is_raised_and_leaves_no_process(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="a fault of rank 0"),
        start_ranks(2, Probe, cuda=False, starter=LocalRanks(tmp_path)) as ranks,
    ):
        probe = Probe(ranks)
        other = probe.processes()[1]
        try:
            probe.fault_on(0)
        finally:
            with pytest.raises(
                RankError, match="rank 0 is out of sync with the others: ValueError"
            ):
                probe.processes()
    assert gone(other)


@pytest.mark.spec("update.rank-exit")
@pytest.mark.slow
def test_ranks_that_fail_to_build_their_models_are_named(tmp_path: Path) -> None:
    with start_ranks(2, fail, cuda=False, starter=LocalRanks(tmp_path)) as ranks:
        probe = Probe(ranks)
        with pytest.raises(RankError, match="no such model here"):
            probe.processes()


@pytest.mark.spec("update.rank-exit")
@pytest.mark.slow
def test_rank_that_raises_does_not_wait_for_its_threads(tmp_path: Path) -> None:
    with start_ranks(2, with_a_thread, cuda=False, starter=LocalRanks(tmp_path)) as ranks:
        probe = with_a_thread(ranks)
        started = time.monotonic()
        with pytest.raises(RankError, match="a fault of rank 1"):
            probe.fault_on(1)
        assert time.monotonic() - started < 30.0  # the thread takes 60


def test_process_in_another_process_group_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with (
            pytest.raises(RankError, match=r"already in a torch.distributed process group"),
            start_ranks(2, Probe, cuda=False, starter=LocalRanks(tmp_path)),
        ):
            pass
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


ENDS_EARLY = """
import logging, os
from pathlib import Path
from _listening import LOOPBACK, listening
from _rank_probe import Probe
from skyrl_fast.train.parallel import rank_processes
from skyrl_fast.train.parallel.local_ranks import LocalRanks

if __name__ == "__main__":
    logging.basicConfig()
    rank_processes.HANG_SECONDS = 1.0
    with rank_processes.start_ranks(2, Probe, cuda=False, starter=LocalRanks(Path("."))) as ranks:
        print("started")
else:  # in the other process
    rank_processes._connect = lambda *arguments: os._exit(3)
"""


@pytest.mark.spec("update.rank-exit")
@pytest.mark.slow
def test_rank_that_exits_before_connecting_does_not_hang_the_others(tmp_path: Path) -> None:
    with script(ENDS_EARLY, tmp_path, stderr=subprocess.PIPE) as child:
        said, errors = child.communicate(timeout=60)
    assert child.returncode == 1 and not said
    assert "rank 1 exited with code 3" in errors


KILLED = """
import os, time
from pathlib import Path
from _listening import LOOPBACK, listening
from _rank_probe import Probe
from skyrl_fast.train.parallel.local_ranks import LocalRanks
from skyrl_fast.train.parallel.rank_processes import start_ranks

if __name__ == "__main__":
    with start_ranks(2, Probe, cuda=False, starter=LocalRanks(Path("."))) as ranks:
        processes = Probe(ranks).processes()
        tool = os.fork()  # inherits all open files
        if tool:
            print(*processes, tool, flush=True)
        time.sleep(60)
"""


def script(text: str, folder: Path, **options: Any) -> subprocess.Popen[str]:
    file = folder / "script.py"
    file.write_text(text)
    here = Path(__file__).resolve().parents[1] / "helpers"
    path = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, str(file)]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, **options
    )


@pytest.mark.spec("update.rank-exit")
def test_no_process_is_left_when_rank_0_is_killed(tmp_path: Path) -> None:
    with script(KILLED, tmp_path) as child:
        assert child.stdout is not None
        rank_0, other, tool = map(int, child.stdout.readline().split())
        os.kill(rank_0, signal.SIGKILL)
    try:
        assert gone(other)
    finally:
        os.kill(tool, signal.SIGKILL)


@pytest.mark.slow
def test_script_that_trains_on_import_gets_advice(folder: Path) -> None:
    script = folder / "script.py"
    script.write_text(
        "import sys\n"
        "from skyrl_fast.config.loading import load_config\n"
        "import skyrl_fast\n"
        "config = load_config(None, sys.argv[1:])\n"
        "skyrl_fast.train_agent(config, reward=lambda answer, row: 0.0)\n"
    )
    options = [
        f"data.train_data=[{folder}/train.jsonl]",
        f"trainer.policy.model.path={folder}/model",
        f"trainer.run_path={folder}/run",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=4",
        "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.device=cpu",
        "generator.max_input_length=40",
        "generator.sampling_params.max_generate_length=16",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    ended = subprocess.run(
        [sys.executable, str(script), *options], env=environment, capture_output=True, text=True
    )
    assert 'put the call below `if __name__ == "__main__":`' in ended.stderr
    assert "the ranks did not start: rank 1 exited with code 1" in ended.stderr


@pytest.mark.spec("update.rank-count")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"policy_num_gpus_per_node: .* visible \(0\), got 2"),
        start_ranks(2, Probe, cuda=True, starter=LocalRanks(tmp_path)),
    ):
        pass


@pytest.mark.spec("update.ranks-equal", "update.ranks-checkpoint")
def test_run_with_a_changed_number_of_ranks_equals_that_of_one(folder: Path) -> None:
    threads = torch.get_num_threads()
    shared, resume = "trainer.placement.policy_num_gpus_per_node=2", "trainer.resume_mode=latest"
    train(settings(folder, "alone"))
    train(settings(folder, "shared", "trainer.max_training_steps=2"))
    train(settings(folder, "shared", shared, resume, "trainer.max_training_steps=4"))
    outcome = train(settings(folder, "shared", resume))
    assert outcome.step == outcome.total_steps == 6
    one, two = (steady(folder / name / "metrics.jsonl") for name in ("alone", "shared"))
    assert len(one) == len(two)
    for wanted, found in zip(one, two, strict=True):
        assert found.keys() >= wanted.keys()  # each part ends with an evaluation
        for name in {"reward/avg_raw_reward", "policy/grad_norm", "policy/loss"} & wanted.keys():
            assert found[name] == pytest.approx(wanted[name], rel=1e-2, abs=1e-4), name
    assert (folder / "shared" / "rank_1.log").exists()
    assert torch.get_num_threads() == threads


@pytest.mark.slow  # starts a process
@pytest.mark.spec("update.sequence-ranks")
def test_run_with_shared_sequences_equals_that_of_one_rank(folder: Path) -> None:
    shared = "trainer.placement.policy_num_gpus_per_node=2"
    train(settings(folder, "alone"))
    train(settings(folder, "shared", shared, "trainer.policy.sequence_parallel_size=2"))
    one, two = (steady(folder / name / "metrics.jsonl") for name in ("alone", "shared"))
    assert len(one) == len(two) > 1
    for wanted, found in zip(one, two, strict=True):
        for name in {"reward/avg_raw_reward", "policy/grad_norm", "policy/loss"} & wanted.keys():
            assert found[name] == pytest.approx(wanted[name], rel=1e-2, abs=1e-4), name


def test_messages_are_in_memory_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of gloo can be the last that holds one: it would free Python's objects."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "broadcast", lambda tensor, source, group: sent.append(tensor))
    assert Ranks(0, 2).call(len, len, "four") == 4
    length, message = sent
    assert (int(length), message.dtype) == (len(message), torch.uint8)
    assert all(tensor.untyped_storage().resizable() for tensor in sent)  # only torch's own are
