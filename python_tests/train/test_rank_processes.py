"""Rank processes: calls, faults, exits; a full run of two."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _listening import LOOPBACK, listening
from _rank_probe import Probe, Unreadable, sharing_probe
from _training import folder as folder
from _training import settings, steady, train

from skyrl_fast.system.network_interface import interface_to
from skyrl_fast.train.checkpoint.manifest import MANIFEST, find_damage, make_manifest
from skyrl_fast.train.parallel.local_ranks import LocalRanks
from skyrl_fast.train.parallel.per_rank import PerRank
from skyrl_fast.train.parallel.rank_processes import RankProcesses, start_ranks
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


@pytest.mark.spec("update.rank-network")
def test_call_reaches_all_ranks_which_listen_on_loopback_only(tmp_path: Path) -> None:
    with start_ranks(2, Probe, cuda=False, starter=LocalRanks(tmp_path)) as ranks:
        probe = Probe(ranks)
        first, other = probe.processes()
        assert first == os.getpid() != other
        assert all(listening(process) == {LOOPBACK} for process in (first, other))
        view = torch.arange(1000)[::10].bool()
        found = probe.echo({"view": view, "none": None}, of=probe)
        assert [(rank, mine) for rank, _, mine in found] == [(0, True), (1, True)]
        assert all(torch.equal(value["view"], view) for _, value, _ in found)
        nested = "processes: called by another run_on_all_ranks function"
        with pytest.raises(RuntimeError, match=nested):
            probe.nested()
    assert gone(other)


def write_files(folder: Path) -> dict[str, int]:
    """Write files with their manifest, of which each of two ranks reads one; return the bytes."""
    (folder / "first").write_bytes(b"a" * 1000)
    (folder / "second").write_bytes(b"b" * 1000)
    (folder / MANIFEST).write_text(json.dumps(make_manifest(folder)))
    return {"first": 1000, "second": 1000}


@pytest.mark.spec("update.ranks-verify")
def test_ranks_verify_files_together_before_they_connect(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_files(folder)
    with closing(RankProcesses(LocalRanks(tmp_path), cuda=False)) as processes:
        read_digests = partial(processes.digest_pieces, 2)
        assert find_damage(folder, read_digests) is None
        for name in ("first", "second"):
            before = (folder / name).read_bytes()
            (folder / name).write_bytes(before[:-1] + b"x")
            found = find_damage(folder, read_digests)
            assert found == (name, "its content is not what was written (digests differ)")
            (folder / name).write_bytes(before)

        def lose_second(folder: Path, sizes: Mapping[str, int]) -> Iterable[bytes | str]:
            (folder / "second").unlink()
            return read_digests(folder, sizes)

        assert find_damage(folder, lose_second) == ("second", "missing (rank 1)")
        assert not dist.is_initialized()
        with processes.connect(2, Probe) as ranks:
            assert len(Probe(ranks).processes()) == 2


def test_rank_that_is_killed_while_it_verifies_is_named(tmp_path: Path) -> None:
    sizes = write_files(tmp_path)
    pipe = tmp_path / "second"
    pipe.unlink()
    os.mkfifo(pipe)

    def kill_reader() -> None:
        while True:
            try:
                writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
                break
            except OSError:  # rank 1 does not read it yet
                time.sleep(0.05)
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
        os.close(writer)

    thread = threading.Thread(target=kill_reader)
    thread.start()
    message = "the ranks did not verify the checkpoint: rank 1 exited with code -9"
    with (
        closing(RankProcesses(LocalRanks(tmp_path), cuda=False)) as processes,
        pytest.raises(RankError, match=message),
    ):
        processes.digest_pieces(2, tmp_path, sizes)
    thread.join()


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


def test_each_rank_gets_its_part_of_an_argument(tmp_path: Path) -> None:
    made: list[int] = []

    def part(number: int) -> torch.Tensor:
        made.append(number)
        return torch.full((1000 * number,), number)

    with start_ranks(3, Probe, cuda=False, starter=LocalRanks(tmp_path)) as ranks:
        probe = Probe(ranks)
        ranks.traffic.take()
        found = probe.parts(PerRank(part), 7, last=PerRank(str).map(len))
        traffic = ranks.traffic.take()
    for number, (rank, first, common, last) in enumerate(found):
        assert (rank, common, last) == (number, 7, 1)
        assert torch.equal(first, torch.full((1000 * number,), number))
    assert sorted(made) == [0, 1, 2]  # rank 0 makes each part once
    assert traffic["traffic/rows_messages"] == 2
    # int64 of two ranks, and what their names and types take.
    assert 0 <= traffic["traffic/rows_bytes"] - 8 * 3000 < 1000
    assert traffic["traffic/calls_bytes"] < 1000


def test_ranks_that_share_sequences_get_the_same_part(tmp_path: Path) -> None:
    with start_ranks(4, sharing_probe, cuda=False, starter=LocalRanks(tmp_path)) as ranks:
        probe = sharing_probe(ranks)
        ranks.traffic.take()
        parts = probe.parts_of_all(PerRank(str))
        traffic = ranks.traffic.take()
        gathered = [probe.ranks_of(from_each) for from_each in (False, True)]
    assert parts == ["0", "0", "1", "1"]
    assert gathered == [[0, 2], [0, 1, 2, 3]]  # the same items once, or each rank's own
    assert traffic["traffic/rows_messages"] == 3


def test_a_rank_that_is_killed_while_it_gets_its_part_is_named(probe: Probe) -> None:
    other = probe.processes()[1]

    def part(number: int) -> torch.Tensor:
        if number == 1:
            os.kill(other, signal.SIGKILL)
        return torch.zeros(1 << 22)  # more than a socket takes without a reader

    with pytest.raises(RankError, match="rank 1 exited with code -9"):
        probe.parts(PerRank(part), 7, last=PerRank(str))
    assert gone(other)


def test_a_part_that_a_rank_cannot_read_ends_the_call_with_its_reason(probe: Probe) -> None:
    other = probe.processes()[1]
    unreadable = PerRank(lambda number: [None, Unreadable()][number])
    with pytest.raises(RankError, match=r"rank 1 exited with code 1; .*no number"):
        probe.parts(unreadable, 7, last=PerRank(str))
    assert gone(other)


def test_a_part_that_cannot_be_made_is_raised_and_no_call_follows(probe: Probe) -> None:
    def part(number: int) -> int:
        raise ValueError(f"no rows for {number}")

    with pytest.raises(ValueError, match="no rows for 1"):
        probe.parts(PerRank(part), 7, last=PerRank(str))
    with pytest.raises(RankError, match="out of sync with the others: ValueError: no rows for 1"):
        probe.processes()


def test_interface_to_an_address() -> None:
    assert interface_to("127.0.0.1") == interface_to("127.1.2.3") == "lo"


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
        "if __name__:  # which no process is told apart by, so that it is not found at once\n"
        "    skyrl_fast.train_agent(config, reward=lambda answer, row: 0.0)\n"
    )
    options = [
        f"data.train_data=[{folder}/train.jsonl]",
        f"trainer.policy.model.path={folder}/model",
        f"trainer.run_path={folder}/run",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=4",
        "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.device=cpu",
        "generator.chat_template=plain",
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


def test_messages_are_in_memory_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of gloo can be the last that holds one: it would free Python's objects."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "broadcast", lambda tensor, source, group: sent.append(tensor))
    assert Ranks(0, 2).call(len, len, "four") == 4
    length, message = sent
    assert (int(length), message.dtype) == (len(message), torch.uint8)
    assert all(tensor.untyped_storage().resizable() for tensor in sent)  # only torch's own are
