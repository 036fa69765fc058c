"""Rank 0 of a recorded step, beside stand-ins for any number of ranks and engines.

Rank 0 splits and pickles rows, sends them, unpickles results, calls engines by httpx and requests
tokens by the trainer's own pool: what it costs is measured. The others compute nothing.
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
    ROWS,
    TREE,
    accept,
    children_of,
    connect,
    gather_lengths,
    listen,
    receive,
)
from scripts.scaling_table import PASS_BYTES, RESPONSE_BYTES, RESULT_BYTES, ROW_BYTES, TOKEN_BYTES
from skyrl_fast.batch import StepBatch
from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout.engine.pool import EnginePool
from skyrl_fast.rollout.engine.remote import RemoteEngine
from skyrl_fast.train.parallel.traffic import CALLS

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 151_936
HEAD_BYTES = 300  # of a request or an answer, about
LENGTH_MESSAGES = 2  # of a rank for each other one, as lengths go around the ring: out and in


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

    def call(self, data: bytes, kind: str = "calls") -> None:
        """Send a call to all, as `Ranks.call` does: its length, then its bytes."""
        length = LENGTH.pack(len(data))
        for child in self._children:
            child.sendall(length)
        for child in self._children:
            child.sendall(data)
        number = len(self._children)
        self.cost.add(kind, number * (len(length) + len(data)), 2 * number)

    def send_rows(self, batch: StepBatch) -> None:
        """Send each other rank its rows; those of a mini-batch are dealt by turns."""
        for rank, connection in enumerate(self._direct, 1):
            data = pickle_rows(batch.rows(torch.arange(rank, batch.num_rows, self.size)))
            connection.sendall(LENGTH.pack(len(data)))
            connection.sendall(data)
            self.cost.add("rows", LENGTH.size + len(data))

    def gather(self) -> list[Any]:
        """Return the results of all others, as `Ranks.gather` does."""
        lengths = gather_lengths(0, self.size, self._before, self._after)[1:]
        others = len(self._direct)
        self.cost.add("results", others * LENGTH_MESSAGES * LENGTH.size, others * LENGTH_MESSAGES)
        results = []
        for connection, length in zip(self._direct, reversed(lengths), strict=True):
            results += pickle.loads(receive(connection, length))
            self.cost.add("results", length)
        return results


def pickle_rows(batch: StepBatch) -> bytes:
    """Return a batch as the ranks send it: tensors as the bytes of arrays."""
    columns = {}
    for name in batch.__dataclass_fields__:
        value = getattr(batch, name)
        columns[name] = value.numpy() if isinstance(value, torch.Tensor) else value
    buffer = io.BytesIO()
    pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(columns)
    return buffer.getvalue()


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


def results_of(num_responses: int) -> bytes:
    """Return a rank's results of one pass: positions, log-probabilities, metrics."""
    result = {
        "positions": np.zeros(num_responses, np.int64),
        "logprobs": np.zeros(num_responses, np.float32),
        "metrics": bytes(PASS_BYTES),
    }
    return pickle.dumps([result], pickle.HIGHEST_PROTOCOL)


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


def replay_ranks(recording: Recording, size: StepSize, ranks: int) -> Cost:
    """Return what a step costs rank 0 that it exchanges with the other ranks."""
    cost = Cost()
    calls = recording.of_kind(CALLS)
    with_rows = sum(round(call.count) for call in calls if call.rows)
    batch = batch_of(size, size.rows // with_rows)
    with listen() as listener:
        port = listener.getsockname()[1]
        with stand_ins("ranks", str(ranks), str(port)) as ports:
            rank_0 = RankZero(ranks, ports[0], listener, cost)
            share = batch.num_rows // ranks * size.responses
            rank_0.call(ANSWER + results_of(share), "set up")
            for call in calls:
                header = max(1, round((call.sent - call.rows) / call.count))
                for _ in range(round(call.count)):
                    _replay_call(rank_0, call, header, batch)
            rank_0.call(QUIT, "set up")
    return cost


def _replay_call(rank_0: RankZero, call: Message, header: int, batch: StepBatch) -> None:
    carries_rows = bool(call.rows)
    data = (ROWS if carries_rows else NOTHING) + b"\0" * (header - 1)
    with rank_0.cost.timed("calls"):
        rank_0.call(data)
    if carries_rows:
        with rank_0.cost.timed("rows"):
            rank_0.send_rows(batch)
        with rank_0.cost.timed("results"):
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
    with cost.timed(REQUEST):
        requests = []
        for number in range(size.rows):
            options = {"session_id": f"trajectory {number}", "policy_version": 0, "seed": number}
            requests.append(pool.generate(prompt, sampling, **options))
        generations = await asyncio.gather(*requests)
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
    """Return what rank 0 exchanges with the other ranks; rows go to the rank that trains them."""
    calls = recording.of_kind(CALLS)
    number = sum(round(call.count) for call in calls)
    with_rows = sum(round(call.count) for call in calls if call.rows)
    headers = sum(call.sent - call.rows for call in calls)
    depth = math.ceil(math.log2(ranks))
    others = ranks - 1
    trained = size.rows * size.responses
    batch = TOKEN_BYTES * size.rows * size.tokens + RESPONSE_BYTES * trained + ROW_BYTES * size.rows
    ring = LENGTH_MESSAGES * LENGTH.size
    results = RESULT_BYTES * trained / ranks + with_rows * (PASS_BYTES + ring)
    return {
        "rows": Term(
            (others * with_rows, "b (N - 1)"),
            (others / ranks * batch, "f (4 S + 17 A + 33 R)"),
        ),
        "calls": Term(
            (2 * depth * number, "2 c log2 N"),
            (depth * (LENGTH.size * number + headers), "(8 c + h) log2 N"),
        ),
        "results": Term(
            ((1 + LENGTH_MESSAGES) * others * with_rows, "3 b (N - 1)"),
            (others * results, f"12 f A + b (N - 1) ({PASS_BYTES:,} n + {ring})"),
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
