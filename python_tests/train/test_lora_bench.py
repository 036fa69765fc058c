"""bench.lora: its runs, the peak memory of a command, and its tables."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import lora
from bench._messages import (
    ENGINE,
    REQUEST,
    Message,
    Recorder,
    Recording,
    load_recording,
    save_recording,
)
from bench._replay import (
    StepSize,
    answer_of,
    batch_of,
    engine_terms,
    pickle_part,
    plan_parts,
    rank_terms,
    replay_engines,
    replay_ranks,
    stand_ins,
)
from bench._stand_ins import children_of, parent_of
from bench.generation import refuse_failures
from bench.growth import Sizes, measure, table, trajectories_of
from bench.lora import Measured, Run, memory_table, reward_table, train
from scripts.scaling_table import PART_BYTES, RESPONSE_BYTES, ROW_BYTES
from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout.engine.remote import RemoteEngine
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.parallel.per_rank import PerRank
from skyrl_fast.train.parallel.ranks import Ranks
from skyrl_fast.train.parallel.traffic import CALLS, RESULTS, ROWS

METRICS: list[dict[str, Any]] = [
    {"step": 0, lora.EVAL: 0.25},
    *(
        {
            "step": step,
            lora.SAMPLED: step / 10,
            "timing/step": seconds,
            "timing/forward_backward": seconds / 2,
            "sync/update_seconds": seconds / 4,
            "sync/num_bytes": 2.5e6,
        }
        for step, seconds in enumerate((9.0, 1.0, 2.0, 3.0), 1)
    ),
    {"step": 4, lora.EVAL: 0.75},
]


PEAKS = {"trainer": 3 << 29, "engine": 1 << 30, "both": 1 << 31}


def test_a_finished_run_is_read_and_tables_leave_the_first_step_out(tmp_path: Path) -> None:
    commands: list[list[str]] = []
    run = Run("quickstart", lora=True, seed=7, frozen=True)
    folder = tmp_path / "lora" / "quickstart_lora_7_lr_0"

    def measure_run(command: Sequence[str]) -> dict[str, int]:
        commands.append([*command])
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in METRICS))
        return PEAKS

    first, second = (train(run, tmp_path, 4, measure=measure_run) for _ in range(2))
    assert first == second == Measured(METRICS, PEAKS)
    (command,) = commands
    assert {"trainer.policy.optimizer_config.lr=0", "trainer.max_training_steps=4"} < {*command}
    assert command[4].endswith("examples/quickstart/lora.yaml")
    row = reward_table({run: first}).splitlines()[-1]
    assert row == "| LoRA, 7, learning rate 0 | 0.25, 0.75 | 1.00 | 0.500 | 2.50 |"
    full = Run("smollm", lora=False, seed=7)
    row = memory_table({full: first}, {full: 9 << 28}).splitlines()[-1]
    sizes = "| smollm: all weights | 1.50 | 1.00 | 2.00 | 2.25 "
    assert row == f"{sizes}| 2.0 | 0.50 | 2.5 | 0.10, 0.40 | 0.25, 0.75 |"
    lora.plot({run: first, full: second}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


# --- bench.growth --------------------------------------------------------------------------------


def test_sizes() -> None:
    sizes = Sizes(trajectories=6, turns=3, tokens=600, group=2)
    sampled = trajectories_of(sizes)
    assert len(sampled) == 6 and len({t.uid for t in sampled}) == 3
    assert all(len(t.steps) == 3 for t in sampled)
    assert 400 < len(sampled[0].steps[-1].prompt_token_ids) <= 600


def test_every_phase_is_measured() -> None:
    cases = {
        size: measure(
            Sizes(trajectories=size, turns=2, tokens=64, group=2),
            repeats=1,
            collect=lambda: None,  # garbage of all that the tests have imported
        )
        for size in (4, 8)
    }
    lines = table("trajectories", cases).splitlines()
    assert len(lines) == 3 + len(cases[4].seconds) == 10
    assert min(cases[8].seconds.values()) > 0


MESSAGES = (
    Message("clear", CALLS, 2, sent=400),
    Message("_gradient", CALLS, 2, sent=2_000),
    Message("_gradient", ROWS, 2, sent=100_000),
    Message("_gradient", RESULTS, 2, received=10_000),
    Message("Policy._logprobs_of_share", CALLS, 1, sent=100),
    Message("Policy._logprobs_of_share", ROWS, 1, sent=50_000),
    Message("Policy._logprobs_of_share", RESULTS, 1, received=5_000),
    Message("/pause", ENGINE, 1, sent=500, received=400),
    Message("/collective_rpc", ENGINE, 2, sent=2_000, received=1_600),
)
STEP = StepSize(rows=32, tokens=4096, responses=1024)


def test_rank_0_exchanges_what_the_formulas_say() -> None:
    recording = Recording(2, 2, 1000, 500, 10, 100, 100, MESSAGES, "here")
    ranks = 5  # no power of two: the tree is not full
    cost = replay_ranks(recording, STEP, ranks)
    terms = rank_terms(recording, STEP, ranks)
    # Three calls with rows of five calls; the tree of five ranks has three levels.
    by_hand = {"plan": 0, "rows": 2 * 3 * 4, "calls": 2 * 3 * 5, "results": 3 * 3 * 4}
    for kind, term in terms.items():
        assert cost.messages[kind] == term.messages[0] == by_hand[kind], kind
        # Rows are dealt whole, and results have headers.
        assert cost.num_bytes[kind] == pytest.approx(term.num_bytes[0], rel=0.1), kind
    assert cost.seconds["plan"] > 0
    engines = 2
    cost = replay_engines(recording, StepSize(rows=8, tokens=64, responses=16), engines)
    term = engine_terms(recording, STEP, engines)[ENGINE]
    assert cost.messages[ENGINE] == term.messages[0] == 3 * engines
    assert cost.num_bytes[ENGINE] == pytest.approx(term.num_bytes[0], rel=0.25)  # HTTP's headers
    assert cost.messages[REQUEST] == 8


async def test_a_step_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(ranks: Ranks, here: Any, there: Any, *arguments: Any, **_: Any) -> None:
        """Send and count what `Ranks.call` does, to two other ranks."""
        ranks.traffic.add(CALLS, 2 * 1200, 2)
        for argument in arguments:
            if isinstance(argument, PerRank):
                assert argument.here is not None
                for number in (1, 2):
                    ranks.traffic.add(ROWS, len(pickle_part(argument.part(number))))
                ranks.traffic.add(RESULTS, 2 * 300, 2)

    monkeypatch.setattr(Ranks, "call", call)
    file = tmp_path / "answer.json"
    file.write_bytes(answer_of(3, 5))
    batch = batch_of(StepSize(rows=6, tokens=16, responses=4), 6)
    ranks = Ranks(0, 3)
    recorder = Recorder("here")
    with recorder.recording(), stand_ins("engines", "1", str(file)) as (port,):
        engine = RemoteEngine(f"http://127.0.0.1:{port}", weight_sync=None)
        await engine.start()
        sampling = SamplingParams(max_generate_length=5)
        await engine.generate([1, 2, 3], sampling, session_id="a", policy_version=0)
        await engine.close()
        for trains in (False, True):  # the share is the part, or within it
            parts = plan_parts(batch, ranks.size, trains=trains)
            ranks.call(batch_of, batch_of, parts)
        ranks.call(answer_of, answer_of, 7, name=8)
        ranks.traffic.take()
    (step,) = recorder.steps
    assert (step.num_tokens, step.num_responses, step.num_rows) == (2 * 96, 2 * 24, 2 * 6)
    assert (step.num_prompt_tokens, step.num_sampled_tokens) == (3, 5)
    by_kind = {(message.name, message.kind): message for message in step.messages}
    names = ["/health", "/v1/models", "/v1/completions", "batch_of", "answer_of"]
    assert list(dict.fromkeys(name for name, _ in by_kind)) == names
    assert by_kind["batch_of", CALLS] == Message("batch_of", CALLS, 2, 2 * 1200, 0)
    assert by_kind["batch_of", RESULTS] == Message("batch_of", RESULTS, 2, 0, 2 * 300)
    rows = by_kind["batch_of", ROWS]
    assert rows.count == 2
    # Tokens, responses and rows of one of three ranks; names of columns vary with their classes.
    part = 2 * (16 * 4 + 4 * RESPONSE_BYTES + ROW_BYTES) + PART_BYTES
    assert rows.sent / 2 == pytest.approx(part, rel=0.1)
    assert by_kind["answer_of", CALLS] == Message("answer_of", CALLS, 1, 1200, 0)
    assert step.names(ROWS) == step.names(RESULTS) == {"batch_of"}
    answer = by_kind["/v1/completions", REQUEST]
    assert answer.received > len(answer_of(3, 5))
    save_recording(step, tmp_path / "messages.json")
    assert load_recording(tmp_path / "messages.json") == step


def test_the_committed_recording_has_all_kinds_of_messages() -> None:
    recording = load_recording()
    assert recording.names(RESULTS) == recording.names(ROWS) < recording.names(CALLS)
    (load,) = (one for one in recording.of_kind(ENGINE) if "load_weights" in one.name)
    assert load.count == 1  # for each engine, in each step
    assert sum(request.count for request in recording.of_kind(REQUEST)) > 1
    batches = recording.num_rows / recording.engines
    assert recording.num_tokens > recording.num_prompt_tokens > batches > 0


@pytest.mark.parametrize("size", [2, 5, 8, 13])
def test_a_binomial_tree_reaches_every_rank_once(size: int) -> None:
    reached = [child for rank in range(size) for child in children_of(rank, size)]
    assert sorted(reached) == list(range(1, size))
    assert all(rank in children_of(parent_of(rank), size) for rank in range(1, size))


# --- the bench of generation refuses to measure what failed --------------------------------------


def trajectory(failure: str | None) -> Trajectory:
    return Trajectory("a", 0, [], "stop", "text2sql", {}, 0.0, failure=failure)


def test_a_failed_trajectory_ends_the_bench_with_its_reason() -> None:
    refuse_failures([trajectory(None)])
    with pytest.raises(SystemExit, match=r"1 of 2 trajectories failed: no database"):
        refuse_failures([trajectory(None), trajectory("no database")])
