"""Rank 0 of a recorded step, beside stand-ins for any number of ranks and engines.

Rank 0 plans the passes of all, takes and pickles the rows of each, sends them, unpickles results,
calls engines by httpx and requests tokens by the trainer's own pool: what it costs is measured. The
others compute nothing.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import pickle
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from bench._messages import ENGINE, REQUEST, Message, Recording
from bench._stand_ins import (
    ANSWER,
    DIRECT,
    LENGTH,
    LOOPBACK,
    NOTHING,
    QUIT,
    RING,
    SHARE,
    TREE,
    accept,
    children_of,
    connect,
    gather_lengths,
    listen,
    receive,
)
from scripts.scaling_table import (
    PART_BYTES,
    PASS_BYTES,
    PASS_TOKENS,
    ROW_BYTES,
    Model,
    Step,
    traffic,
)
from skyrl_fast.batch import StepBatch
from skyrl_fast.batch.step_batch import OPTIONAL
from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout.engine.pool import EnginePool
from skyrl_fast.rollout.engine.protocol import Generation
from skyrl_fast.rollout.engine.remote import RemoteEngine
from skyrl_fast.train.model.micro_batch import plan_micro_batches
from skyrl_fast.train.parallel.per_rank import PerRank
from skyrl_fast.train.parallel.rank_shares import Share, share_passes
from skyrl_fast.train.parallel.ranks import Ranks
from skyrl_fast.train.parallel.traffic import CALLS, RESULTS, ROWS

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 151_936
HEAD_BYTES = 300  # of a request or an answer, about
LENGTH_MESSAGES = 2  # of a rank for each other one, as lengths go around the ring: out and in
PART_MESSAGES = 2  # to each other rank: the length of its part, then the part
MAX_IN_FLIGHT = 32  # requests: on a busy machine a stand-in accepts no more within the time limit
PLAN = "plan"  # a kind of work without messages
GRADIENT = "_gradient"  # of the calls with rows; the others compute values of tokens
ROWS_FORMULA = f"f (8 S + 22 A + {2 * ROW_BYTES} R) + {PART_BYTES + LENGTH.size:,} b (N - 1)"
RESULTS_FORMULA = f"24 f A + (N - 1) ({PASS_BYTES:,} n + {LENGTH_MESSAGES * LENGTH.size} b)"
NO_MODEL = Model(parameters=0, root=0, largest_layer=0, layers=0, weights=0, active=0)


@dataclass(frozen=True, slots=True)
class StepSize:
    """The step that is replayed: rows of equal lengths, as in docs/design/022.

    Args:
        rows: of the batch.
        tokens, responses: of each row.
    """

    rows: int = 2048
    tokens: int = 8192
    responses: int = 2048


@dataclass(slots=True)
class Cost:
    """What rank 0 exchanged at its sockets, and took of its processor, by kind."""

    messages: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, num_bytes: int, messages: int = 1) -> None:
        """Count messages of this many bytes together."""
        self.messages[kind] += messages
        self.num_bytes[kind] += num_bytes

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Add the processor time of the block, of all threads."""
        start = time.process_time()
        yield
        self.seconds[kind] += time.process_time() - start


class RankZero:
    """The connections of rank 0 to its stand-ins, and what goes over them."""

    def __init__(self, size: int, port_of_next: int, listener: Any, cost: Cost) -> None:
        self.size = size
        self.cost = cost
        children = children_of(0, size)
        after = connect(port_of_next, RING, 0)
        accepted = accept(listener, len(children) + size)  # all directly, and the ring's last one
        self._children = [accepted[TREE, child] for child in children]
        self._direct = [accepted[DIRECT, rank] for rank in range(1, size)]
        self._after = after
        self._before = accepted[RING, size - 1]

    def call(self, data: bytes, kind: str = CALLS) -> None:
        """Send a call to all, as `Ranks.call` does: its length, then its bytes."""
        length = LENGTH.pack(len(data))
        for child in self._children:
            child.sendall(length)
        for child in self._children:
            child.sendall(data)
        number = len(self._children)
        self.cost.add(kind, number * (len(length) + len(data)), 2 * number)

    def send_rows(self, parts: PerRank[Any]) -> None:
        """Send each other rank its part, as `Ranks.call` does, and make the one of rank 0."""
        for rank, connection in enumerate(self._direct, 1):
            data = pickle_part(parts.part(rank))
            connection.sendall(LENGTH.pack(len(data)))
            connection.sendall(data)
            self.cost.add(ROWS, LENGTH.size + len(data), PART_MESSAGES)
        assert parts.here is not None

    def gather(self) -> list[Any]:
        """Return the results of all others, as `Ranks.gather` does."""
        lengths = gather_lengths(0, self.size, self._before, self._after)[1:]
        others = len(self._direct)
        self.cost.add(RESULTS, others * LENGTH_MESSAGES * LENGTH.size, others * LENGTH_MESSAGES)
        results = []
        for connection, length in zip(self._direct, reversed(lengths), strict=True):
            results += pickle.loads(receive(connection, length))
            self.cost.add(RESULTS, length)
        return results


class PartPickler(pickle.Pickler):
    """Pickles as the ranks do: tensors as the bytes of arrays."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def pickle_part(part: Any) -> bytes:
    """Return a rank's part of the arguments of a call."""
    buffer = io.BytesIO()
    PartPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(part)
    return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class GradientPart:
    """What a rank needs for its part of a gradient."""

    share: Share
    weights: torch.Tensor


def plan_parts(batch: StepBatch, ranks: int, *, trains: bool) -> PerRank[Any]:
    """Return the passes and rows of each rank, and for a gradient the weights of the rows."""

    def plan(token_budget: int) -> Any:
        return plan_micro_batches(batch, token_budget)

    shares = share_passes(plan, PASS_TOKENS, Ranks(0, ranks))
    if not trains:
        return shares
    weights = torch.ones(batch.num_rows)
    return shares.map(lambda share: GradientPart(share, share.of_rows(weights)))


def batch_of(size: StepSize, num_rows: int) -> StepBatch:
    """Return so many rows of the step, all of whose responses are trained."""
    rng = np.random.default_rng(0)
    numbers = torch.arange(num_rows, dtype=torch.int32)
    ends = torch.arange(num_rows + 1, dtype=torch.int32)
    responses = num_rows * size.responses
    tokens = rng.integers(0, VOCABULARY, num_rows * size.tokens, dtype=np.int32)
    return StepBatch(
        tokens=torch.from_numpy(tokens),
        cu_seqlens=ends * size.tokens,
        cu_responses=ends * size.responses,
        loss_mask=torch.ones(responses, dtype=torch.uint8),
        rewards=torch.zeros(responses),
        row_rewards=torch.zeros(num_rows),
        group_ids=numbers // 8,
        trajectory_ids=numbers,
        is_last_step=torch.ones(num_rows, dtype=torch.bool),
        policy_version=torch.zeros(num_rows, dtype=torch.int32),
        uids=tuple(f"prompt {number}" for number in range(-(-num_rows // 8))),
        rollout_logprobs=-torch.rand(responses),
        old_logprobs=-torch.rand(responses),
        advantages=torch.ones(responses),
    )


def results_of(num_responses: int, passes: int, *, trains: bool) -> bytes:
    """Return a rank's results of passes: positions, log-probabilities, metrics of a gradient."""
    results = []
    for _ in range(passes):
        result = {
            "positions": np.zeros(num_responses // passes, np.int64),
            "logprobs": np.zeros(num_responses // passes, np.float32),
        }
        if trains:
            result["metrics"] = np.zeros(PASS_BYTES, np.uint8)
        results.append(result)
    return pickle.dumps(results, pickle.HIGHEST_PROTOCOL)


@contextmanager
def stand_ins(*arguments: str) -> Iterator[list[int]]:
    """Start them in a process group of their own; yield the ports that they name."""
    command = [sys.executable, "-m", "bench._stand_ins", *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield [int(port) for port in process.stdout.readline().split()]
    finally:
        process.stdin.close()
        process.wait()


@dataclass(frozen=True, slots=True)
class RowsCall:
    """A call that carries rows, in the step that is replayed.

    Args:
        size: of all the step's rows, which the calls of this name divide among them.
        number: of these calls.
        trains: whether it computes a gradient; others compute values of tokens.
    """

    size: StepSize
    number: int
    trains: bool

    @classmethod
    def of(cls, call: Message, size: StepSize) -> RowsCall:
        return cls(size, round(call.count), call.name == GRADIENT)

    @property
    def num_rows(self) -> int:
        return self.size.rows // self.number

    def num_passes(self, ranks: int) -> int:
        """Return the passes of each rank."""
        return math.ceil(self.num_rows * self.size.tokens / (ranks * PASS_TOKENS))

    def batch(self) -> StepBatch:
        """Return its rows, with the columns that it reads."""
        batch = batch_of(self.size, self.num_rows)
        if self.trains:
            return batch
        return batch.with_(**dict.fromkeys(OPTIONAL))

    def results(self, ranks: int) -> bytes:
        """Return the results of a rank."""
        responses = self.num_rows * self.size.responses // ranks
        return results_of(responses, self.num_passes(ranks), trains=self.trains)


def replay_ranks(recording: Recording, size: StepSize, ranks: int) -> Cost:
    """Return what a step costs rank 0 that it exchanges with the other ranks."""
    cost = Cost()
    with_rows = recording.names(ROWS)
    with listen() as listener:
        port = listener.getsockname()[1]
        with stand_ins("ranks", str(ranks), str(port)) as ports:
            rank_0 = RankZero(ranks, ports[0], listener, cost)
            for call in recording.of_kind(CALLS):
                rows = RowsCall.of(call, size) if call.name in with_rows else None
                _replay_calls(rank_0, call, rows)
            rank_0.call(QUIT, "set up")
    return cost


def _replay_calls(rank_0: RankZero, call: Message, rows: RowsCall | None) -> None:
    """Call as often as in the recorded step."""
    number = round(call.count)
    what = NOTHING
    if rows is not None:
        what = SHARE
        batch = rows.batch()
        rank_0.call(ANSWER + rows.results(rank_0.size), "set up")
    data = what + bytes(max(0, round(call.sent / number) - len(what)))
    for _ in range(number):
        if rows is not None:
            # Other tokens than those of the call before, whose plan is kept with them.
            again = batch.with_(tokens=batch.tokens.clone())
            with rank_0.cost.timed(PLAN):
                parts = plan_parts(again, rank_0.size, trains=rows.trains)
        with rank_0.cost.timed(CALLS):
            rank_0.call(data)
        if rows is not None:
            with rank_0.cost.timed(ROWS):
                rank_0.send_rows(parts)
            with rank_0.cost.timed(RESULTS):
                rank_0.gather()


def replay_engines(recording: Recording, size: StepSize, engines: int) -> Cost:
    """Return what a step costs rank 0 that it exchanges with engines."""
    prompt = size.tokens - size.responses
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answer.json"
        file.write_bytes(answer_of(prompt, size.responses))
        with stand_ins("engines", str(engines), str(file)) as ports:
            return asyncio.run(_call_engines(recording, size, ports))


def answer_of(num_prompt_tokens: int, num_sampled: int) -> bytes:
    """Return the answer of vLLM to a request for tokens, of as many fields and digits as its own.

    Example:
        >>> sorted(json.loads(answer_of(2, 1))["choices"][0])[:3]
        ['finish_reason', 'index', 'logprobs']
    """
    rng = np.random.default_rng(0)
    sampled = rng.integers(0, VOCABULARY, num_sampled).tolist()
    prompt = rng.integers(0, VOCABULARY, num_prompt_tokens).tolist()
    logprobs = (-rng.random(num_sampled)).tolist()
    words = [f"word{token % 10}" for token in sampled]
    choice = {
        "index": 0,
        "text": " ".join(words),
        "logprobs": {
            "text_offset": [5 * number for number in range(num_sampled)],
            "token_logprobs": logprobs,
            "tokens": words,
            "top_logprobs": [{word: p} for word, p in zip(words, logprobs, strict=True)],
        },
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": sampled,
        "prompt_token_ids": prompt,
    }
    return json.dumps({"id": "a", "object": "text_completion", "choices": [choice]}).encode()


async def _call_engines(recording: Recording, size: StepSize, ports: Sequence[int]) -> Cost:
    cost = Cost()
    urls = [f"http://{LOOPBACK}:{port}" for port in ports]
    pool = EnginePool([RemoteEngine(url, weight_sync=None, vocab_size=VOCABULARY) for url in urls])
    await pool.start()
    sampling = SamplingParams(max_generate_length=size.responses)
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, size.tokens - size.responses).tolist()
    in_flight = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def request(number: int) -> Generation:
        options = {"session_id": f"trajectory {number}", "policy_version": 0, "seed": number}
        async with in_flight:
            return await pool.generate(prompt, sampling, **options)

    with cost.timed(REQUEST):
        generations = await asyncio.gather(*map(request, range(size.rows)))
    await pool.close()
    assert [len(one.token_ids) for one in generations] == [size.responses] * size.rows
    cost.messages[REQUEST] = size.rows
    calls = recording.of_kind(ENGINE)
    clients = [httpx.AsyncClient(base_url=url, trust_env=False) for url in urls]
    await asyncio.gather(*(client.get("/health") for client in clients))  # connected, as in a run
    with cost.timed(ENGINE):
        for call in calls:
            await asyncio.gather(*(_repeat(client, call, cost) for client in clients))
    for client in clients:
        await client.aclose()
    return cost


async def _repeat(client: httpx.AsyncClient, call: Message, cost: Cost) -> None:
    """Call an engine as often as in the recorded step, with texts of its sizes."""
    number = max(1, round(call.count))
    sent, received = round(call.sent / number), round(call.received / number)
    body = {"args": "a" * max(0, sent - HEAD_BYTES)}
    for _ in range(number):
        answer = await client.post(f"/bytes/{max(0, received - HEAD_BYTES)}", json=body)
        answer.raise_for_status()
        answer.json()
        cost.add(ENGINE, len(answer.request.content) + len(answer.content) + 2 * HEAD_BYTES)


@dataclass(frozen=True, slots=True)
class Term:
    """Messages and bytes of rank 0 of one kind in a step, each with its formula.

    Symbols are those of docs/design/022; `c` calls of `h` bytes, `b` of them with rows; `E` engines
    with `k` calls of `e` bytes each.
    """

    messages: tuple[float, str]
    num_bytes: tuple[float, str]


def rank_terms(recording: Recording, size: StepSize, ranks: int) -> dict[str, Term]:
    """Return what rank 0 exchanges with the other ranks.

    Bytes of parts and results are by the formulas that `test_traffic.py` compares with runs.
    """
    calls = sum(round(call.count) for call in recording.of_kind(CALLS))
    headers = sum(call.sent for call in recording.of_kind(CALLS))
    with_rows = [RowsCall.of(message, size) for message in recording.of_kind(ROWS)]
    trained = [call for call in with_rows if call.trains]
    number = sum(call.number for call in with_rows)
    depth = math.ceil(math.log2(ranks))
    others = ranks - 1
    step = Step(
        ranks,
        tokens=size.rows * size.tokens,
        responses=size.rows * size.responses,
        rows=size.rows,
        trained=sum(call.number * call.num_passes(ranks) for call in trained),
        mini_batches=sum(call.number for call in trained),
        batches=number - sum(call.number for call in trained),
    )
    wanted = traffic(NO_MODEL, step)
    _, of_parts = wanted[ROWS]
    _, of_results = wanted[RESULTS]
    of_lengths = number * others * LENGTH.size
    return {
        PLAN: Term((0, ""), (0, "")),
        ROWS: Term(
            (PART_MESSAGES * number * others, "2 b (N - 1)"), (of_parts + of_lengths, ROWS_FORMULA)
        ),
        CALLS: Term(
            (2 * depth * calls, "2 c log2 N"),
            (depth * (LENGTH.size * calls + headers), "(8 c + h) log2 N"),
        ),
        RESULTS: Term(
            ((1 + LENGTH_MESSAGES) * number * others, "3 b (N - 1)"),
            (of_results + LENGTH_MESSAGES * of_lengths, RESULTS_FORMULA),
        ),
    }


def engine_terms(recording: Recording, size: StepSize, engines: int) -> dict[str, Term]:
    """Return what rank 0 exchanges with engines."""
    calls = recording.of_kind(ENGINE)
    number = sum(max(1, round(call.count)) for call in calls)
    each = sum(call.sent + call.received for call in calls)
    terms = {REQUEST: Term((size.rows, "R"), (0, ""))}
    if calls:
        terms[ENGINE] = Term((engines * number, "k E"), (engines * each, "e E"))
    return terms
