"""CPU time of the gateway per call, next to the engine: over the turns of one session.

    python -m bench.gateway [--turns 128] [--tokens 1000]

Each turn adds `--tokens` tokens, half of them sampled. The requests go to the ASGI application as a
server would pass them, so the time is that of parsing, rendering, tokenising, recording and the
answer's JSON; the client's is not part of it. As in a run, the collector does not visit the objects
that exist at the start. Other programs on the machine slow a run down; the last column is that of
the least disturbed one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench._tokenizer import byte_level_tokenizer
from skyrl_fast.config import GeneratorConfig, SamplingParams
from skyrl_fast.gateway.policy import ServedPolicy
from skyrl_fast.gateway.server import Gateway
from skyrl_fast.gateway.session import Session
from skyrl_fast.rollout.activity import ActivityBoard
from skyrl_fast.rollout.chat_template import ChatTemplate
from skyrl_fast.rollout.engine.protocol import Generation
from skyrl_fast.rollout.engine.weights.gate import WeightGate
from skyrl_fast.rollout.policy_calls import PolicyCalls
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.flow.frozen_heap import freeze_heap

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 8_000
SHOWN = 8  # turns in the table


class Recited:
    """An engine that answers at once, with tokens of a text."""

    def __init__(self, token_ids: list[int], length: int, end: int) -> None:
        self._ids, self._length, self._end = token_ids, length, end
        self._random = random.Random(0)

    async def generate(self, prompt_token_ids: Any, sampling: Any, **_: Any) -> Generation:
        """Return tokens of the text, and the end token."""
        start = self._random.randrange(len(self._ids) - self._length)
        ids = [*self._ids[start : start + self._length - 1], self._end]
        return Generation(ids, [-0.5] * len(ids), "stop")


async def call(app: Any, key: str, body: bytes) -> tuple[float, bytes]:
    """Return the CPU seconds of one request, and the answer."""
    parts: list[bytes] = []
    waits = asyncio.Event()
    bodies = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not bodies:
            await waits.wait()
        return bodies.pop()

    async def send(message: dict[str, Any]) -> None:
        parts.append(message.get("body", b""))

    headers = [(b"authorization", f"Bearer {key}".encode())]
    scope = {
        **{"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers},
        **{"query_string": b"", "root_path": "", "http_version": "1.1", "scheme": "http"},
        **{"raw_path": b"/v1/chat/completions", "server": ("gateway", 80)},
    }
    started = time.process_time()
    await app(scope, receive, send)
    return time.process_time() - started, b"".join(parts)


async def session_times(turns: int, tokens: int) -> tuple[list[tuple[float, int]], Trajectory]:
    """Return the CPU seconds and the prompt's tokens of each turn of a session that grows.

    Also its trajectory.
    """
    texts = [path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))]
    tokenizer = byte_level_tokenizer(texts=texts, vocab_size=VOCABULARY)
    ids = tokenizer.encode("".join(texts))
    half = tokens // 2
    longest = (turns + 1) * tokens
    config = GeneratorConfig(
        max_input_length=longest,
        max_turns=turns,
        context="append",
        sampling_params=SamplingParams(max_generate_length=tokens),
    )
    board = ActivityBoard()
    policy = ServedPolicy(
        PolicyCalls(Recited(ids, half, tokenizer.eos_token_id), WeightGate(), tokenizer, 0),
        config,
        ChatTemplate(tokenizer, max_length=longest),
        board,
        "policy",
    )
    trajectory = Trajectory("p", 0, [], "stop", "agent", {}, 0.0)
    session = Session(policy, trajectory, board.enter("p", 0), policy_version=0)
    gateway = Gateway()
    app, key = gateway.app(), gateway.open(session)
    messages: list[dict[str, str]] = []
    found = []
    for turn in range(turns):
        start = (turn * 7919) % (len(ids) - half)
        messages.append({"role": "user", "content": tokenizer.decode(ids[start : start + half])})
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        seconds, answer = await call(app, key, body)
        parsed = json.loads(answer)
        text = parsed["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": text})
        found.append((seconds, parsed["usage"]["prompt_tokens"]))
    assert session.counts["continued_prompts"] == turns - 1, session.counts
    return found, trajectory


def kept_bytes(trajectory: Trajectory) -> int:
    """Return the memory of the token ids of all prompts."""
    prompts = [step.prompt_token_ids for step in trajectory.steps]
    parts = {id(part): part.nbytes for prompt in prompts for part in prompt.parts}
    return sum(parts.values()) + sum(sys.getsizeof(prompt.parts) for prompt in prompts)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with freeze_heap():
        played = [
            asyncio.run(session_times(options.turns, options.tokens)) for _ in range(options.runs)
        ]
    runs = [times for times, _ in played]
    print("| turn | prompt tokens | CPU ms per call | least of the runs |\n|---|---|---|---|")
    width = max(1, options.turns // SHOWN)
    for first in range(0, options.turns, width):
        blocks = [run[first : first + width] for run in runs]
        medians = [1000 * statistics.median(seconds for seconds, _ in block) for block in blocks]
        turns, tokens = f"{first + 1} to {first + width}", blocks[0][-1][1]
        print(f"| {turns} | {tokens:,} | {statistics.median(medians):.2f} | {min(medians):.2f} |")
    print(f"\nprompts of {options.turns} steps: {kept_bytes(played[0][1]) / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
