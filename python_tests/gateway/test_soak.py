"""Ten thousand calls of two hundred sessions at once; some are malformed, slow or broken off."""

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import pytest
from _gateway import MODEL, played
from fake_envs import FakePrompt, says

httpx = pytest.importorskip("httpx")

SESSIONS = 200
CALLS = 50
MALFORMED = 0.01
BROKEN_OFF = 0.01
SLOW = 0.01
MOST_MIB = 300  # of the recorded steps and of the allocator; measured: 74


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.spec("gateway.lost-clients")
def test_nothing_is_lost_and_nothing_grows(tiny_tokenizer: Any) -> None:
    counts = {"delivered": 0, "malformed": 0, "broken": 0}
    chance = random.Random(0)

    async def agent(task: Any) -> dict[str, float]:
        headers = {"authorization": f"Bearer {task.api_key}", "content-type": "application/json"}
        messages: list[dict[str, str]] = [{"role": "user", "content": str(task.row["n"])}]
        mine = 0
        async with httpx.AsyncClient(
            base_url=task.base_url, headers=headers, verify=False, timeout=None
        ) as client:
            for _ in range(CALLS):
                kind = chance.random()
                if kind < MALFORMED:
                    answer = await client.post("/chat/completions", content=b'{"model": ')
                    assert answer.status_code == 400
                    counts["malformed"] += 1
                    continue
                body = {"model": MODEL, "messages": messages}
                if kind < MALFORMED + BROKEN_OFF:
                    post = asyncio.create_task(client.post("/chat/completions", json=body))
                    await asyncio.sleep(chance.random() * 0.01)
                    post.cancel()
                    await asyncio.wait([post])
                    counts["broken"] += 1
                if kind > 1 - SLOW:
                    stream = {**body, "stream": True}
                    async with client.stream("POST", "/chat/completions", json=stream) as slow:
                        async for _part in slow.aiter_bytes(16):
                            await asyncio.sleep(0.001)
                    text = "b"
                else:
                    answer = await client.post("/chat/completions", json=body)
                    text = answer.json()["choices"][0]["message"]["content"]
                mine += 1
                messages += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": "more"},
                ]
                messages = messages[-6:] if len(messages) > 12 else messages
        counts["delivered"] += mine
        return {"reward": 1.0, "mine": mine}

    options: dict[str, Any] = {
        "answer": lambda call, n: says(tiny_tokenizer, f"b{n % 7}"),
        "max_concurrent_trajectories": SESSIONS,
        "max_turns": 10 * CALLS,
        "max_retries": 0,
    }
    played(agent, tiny_tokenizer, prompts=[FakePrompt("w", env_extras={"n": 0})], **options)
    files, memory = open_files(), resident_mib()
    counts.update(dict.fromkeys(counts, 0))
    prompts = [FakePrompt(str(n), env_extras={"n": n}) for n in range(SESSIONS)]
    out = played(agent, tiny_tokenizer, prompts=prompts, **options)
    assert [t.failure for t in out.trajectories] == [None] * SESSIONS
    for t in out.trajectories:  # a call that was broken off may have been delivered, too
        assert t.env_metrics["mine"] <= len(t.steps) <= t.env_metrics["calls"]
    steps = sum(len(t.steps) for t in out.trajectories)
    assert counts["delivered"] <= steps <= counts["delivered"] + counts["broken"]
    assert out.faults["gateway_refused_calls"] == counts["malformed"] > 0
    assert open_files() <= files
    assert resident_mib() - memory < MOST_MIB
