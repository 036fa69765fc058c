"""The messages of a step of rank 0, to ranks and to engines: recorded from a run, kept as JSON.

All that the growth by ranks and by engines knows of counts and sizes stands in this file.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from skyrl_fast.rollout.engine.remote import RemoteEngine
from skyrl_fast.train.parallel.per_rank import PerRank
from skyrl_fast.train.parallel.rank_shares import Share
from skyrl_fast.train.parallel.ranks import Ranks
from skyrl_fast.train.parallel.traffic import CALLS, RESULTS, ROWS, Traffic

FILE = Path(__file__).resolve().parent / "results" / "messages.json"
EXCHANGED = (CALLS, ROWS, RESULTS)  # the other kinds are collectives of tensors
ENGINE, REQUEST = "engine", "request"  # kinds of an engine's calls: all but those for tokens
COMPLETIONS = "/v1/completions"
PROBE = "probe"  # session of the request that verifies an engine's weights


@dataclass(frozen=True, slots=True)
class Message:
    """Messages of one name in a step.

    Args:
        name: the method that all ranks run, or the path of an engine's call.
        kind: of `traffic.py`, or ENGINE or REQUEST.
        count: for each other rank, or each engine.
        sent, received: bytes of all of them, for each other rank or engine.
    """

    name: str
    kind: str
    count: float
    sent: int = 0
    received: int = 0


@dataclass(frozen=True, slots=True)
class Recording:
    """One step of a run.

    Args:
        ranks, engines: of the run.
        num_tokens, num_responses, num_rows: of the rows that calls carried, rank 0's own included.
        num_prompt_tokens, num_sampled_tokens: of all requests.
        messages: by name.
        where: versions and machine.
    """

    ranks: int
    engines: int
    num_tokens: int
    num_responses: int
    num_rows: int
    num_prompt_tokens: int
    num_sampled_tokens: int
    messages: tuple[Message, ...]
    where: str

    def of_kind(self, kind: str) -> list[Message]:
        """Return the messages of a kind."""
        return [message for message in self.messages if message.kind == kind]

    def names(self, kind: str) -> set[str]:
        """Return the names of the calls that have messages of a kind."""
        return {message.name for message in self.of_kind(kind)}


def load_recording(file: Path = FILE) -> Recording:
    """Return the committed recording."""
    data = json.loads(file.read_text())
    messages = tuple(Message(**each) for each in data.pop("messages"))
    return Recording(**data, messages=messages)


def save_recording(recording: Recording, file: Path = FILE) -> None:
    """Write it in place of the committed one."""
    file.write_text(json.dumps(asdict(recording), indent=1) + "\n")


class Recorder:
    """Counts what rank 0 exchanges, from one step's end to the next."""

    def __init__(self, where: str) -> None:
        self.steps: list[Recording] = []
        self._where = where
        self._ranks = 1
        self._running = threading.local()  # the name of the call that each thread makes
        self._begin()

    def _begin(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._sent: Counter[tuple[str, str]] = Counter()
        self._received: Counter[tuple[str, str]] = Counter()
        self._sizes: Counter[str] = Counter()
        self._answers: list[tuple[tuple[str, str], httpx.Response]] = []
        self._engines: set[int | None] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record all that this process exchanges in the block."""
        add = Traffic.add
        take = Traffic.take
        call = Ranks.call
        send = httpx.AsyncClient.send
        generate = RemoteEngine.generate

        def count(traffic: Traffic, kind: str, num_bytes: int, messages: int = 1) -> None:
            if kind in EXCHANGED:
                self._add(kind, num_bytes, messages)
            add(traffic, kind, num_bytes, messages)

        def end_step(traffic: Traffic) -> dict[str, float]:
            self._end_step()
            return take(traffic)

        def name_call(ranks: Ranks, here: Any, there: Any, *arguments: Any, **options: Any) -> Any:
            self._ranks = ranks.size
            self._running.name = here.__qualname__
            shares: dict[int, Share] = {}
            seen = [_watch_shares(argument, shares) for argument in arguments]
            result = call(ranks, here, there, *seen, **options)
            self._see_shares(shares)
            return result

        async def count_request(
            client: httpx.AsyncClient, request: httpx.Request, **options: Any
        ) -> httpx.Response:
            answer = await send(client, request, **options)
            self._see_request(request, answer)
            return answer

        async def count_tokens(
            engine: RemoteEngine, prompt: Any, *others: Any, **options: Any
        ) -> Any:
            generation = await generate(engine, prompt, *others, **options)
            self._sizes["prompt"] += len(prompt)
            self._sizes["sampled"] += len(generation.token_ids)
            return generation

        with ExitStack() as stack:
            stack.enter_context(patch.object(Traffic, "add", count))
            stack.enter_context(patch.object(Traffic, "take", end_step))
            stack.enter_context(patch.object(Ranks, "call", name_call))
            stack.enter_context(patch.object(httpx.AsyncClient, "send", count_request))
            stack.enter_context(patch.object(RemoteEngine, "generate", count_tokens))
            yield

    def _add(self, kind: str, num_bytes: int, messages: int) -> None:
        key = self._running.name, kind
        self._counts[key] += messages
        into = self._received if kind == RESULTS else self._sent
        into[key] += num_bytes

    def _see_shares(self, shares: dict[int, Share]) -> None:
        """Add the sizes of the rows that each rank has got."""
        for share in shares.values():
            batch = share.batch
            self._sizes["tokens"] += batch.num_tokens
            self._sizes["responses"] += len(batch.loss_mask)
            self._sizes["rows"] += batch.num_rows

    def _see_request(self, request: httpx.Request, answer: httpx.Response) -> None:
        path = request.url.path
        self._engines.add(request.url.port)
        is_probe = request.headers.get("x-session-id") == PROBE
        if path == COMPLETIONS and not is_probe:
            kind = REQUEST
        else:
            kind = ENGINE
        method = json.loads(request.content).get("method", "") if request.content else ""
        key = " ".join(filter(None, (path, method, PROBE if is_probe else ""))), kind
        head = sum(len(name) + len(value) for name, value in request.headers.raw)
        self._counts[key] += 1
        self._sent[key] += head + len(request.content)
        self._answers.append((key, answer))

    def _end_step(self) -> None:
        engines = max(1, len(self._engines))
        for key, answer in self._answers:
            head = sum(len(name) + len(value) for name, value in answer.headers.raw)
            self._received[key] += head + answer.num_bytes_downloaded
        messages = []
        for key, number in self._counts.items():
            name, kind = key
            others = self._ranks - 1 if kind in EXCHANGED else engines
            sent = self._sent[key] // others
            received = self._received[key] // others
            messages.append(Message(name, kind, number / others, sent, received))
        sizes = self._sizes
        self.steps.append(
            Recording(
                self._ranks,
                engines,
                sizes["tokens"],
                sizes["responses"],
                sizes["rows"],
                sizes["prompt"],
                sizes["sampled"],
                tuple(messages),
                self._where,
            )
        )
        self._begin()


def _watch_shares(argument: Any, shares: dict[int, Share]) -> Any:
    """Return an argument whose parts put their share of a batch into a table, by its number."""
    if not isinstance(argument, PerRank):
        return argument

    def part(number: int) -> Any:
        value = argument.part(number)
        share = find_share(value)
        if share is not None:
            shares[number] = share
        return value

    return PerRank(part)


def find_share(value: Any) -> Share | None:
    """Return the share that a part of a call is or has; None: it has no rows."""
    if isinstance(value, Share):
        return value
    if not is_dataclass(value):
        return None
    of_fields = (find_share(getattr(value, field.name)) for field in fields(value))
    return next((share for share in of_fields if share is not None), None)


def record(folder: Path, where: str, overrides: Sequence[str] = ()) -> Recording:
    """Run small steps of the quickstart with two ranks and two engines; return the last one.

    Args:
        folder: of the run.
        where: versions and machine.
        overrides: further settings of the run.
    """
    from examples.quickstart.run import RECIPES
    from examples.tiny_model import recipe

    recorder = Recorder(where)
    settings = [
        "trainer.placement.policy_num_gpus_per_node=2",
        "generator.inference_engine.num_engines=2",
        "trainer.max_training_steps=3",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=2",
        "trainer.eval_before_train=false",
        "trainer.device=cpu",
        *overrides,
    ]
    with recorder.recording():
        code = recipe.run(RECIPES["quickstart"], folder, settings, is_resumed=False)
    if code:
        raise SystemExit(code)
    return recorder.steps[-1]
