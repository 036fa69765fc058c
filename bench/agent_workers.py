"""Time to run an agent that does nothing, where `agent.workers` says: what each agent costs.

    python -m bench.agent_workers [--agents 200]

A function returns at once, a command is `true`; neither calls the gateway. The four are run by
turns, so that other work on the machine disturbs all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from typing import Any

from skyrl_fast.config import AgentConfig
from skyrl_fast.gateway.agents.task import AgentTask, BlackBox
from skyrl_fast.gateway.start import black_box

TASK = AgentTask(
    {"prompt": [{"role": "user", "content": 1_000 * "x"}]}, "http://gateway", "key", "policy"
)
AT_ONCE = 32
WARM_UP = 5


def nothing(task: AgentTask) -> float:
    """Return a reward."""
    return 1.0


def agents() -> dict[str, BlackBox]:
    """Return the agents to compare, by name."""
    kinds: dict[str, dict[str, Any]] = {
        "function": {"function": "bench.agent_workers:nothing"},
        "command": {"command": ["true"]},
    }
    return {
        f"{kind}, {place}": black_box(AgentConfig(workers=place, **options))
        for place in ("thread", "process")
        for kind, options in kinds.items()
    }


async def seconds(agent: BlackBox, times: int = 1) -> float:
    """Return the elapsed seconds of so many agents at once."""
    started = time.perf_counter()
    await asyncio.gather(*(agent.run(TASK) for _ in range(times)))
    return time.perf_counter() - started


async def compare(number: int) -> None:
    """Write a line for each agent."""
    compared = agents()
    first: dict[str, float] = {}
    for name, agent in compared.items():
        await agent.start()
        first[name] = await seconds(agent)
        for _ in range(WARM_UP):
            await seconds(agent)
    single: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(number):
        for name, agent in compared.items():
            single[name].append(await seconds(agent))
    for name, agent in compared.items():
        await seconds(agent, AT_ONCE)
        many = 1e3 * await seconds(agent, AT_ONCE) / AT_ONCE
        median = 1e3 * statistics.median(single[name])
        sys.stdout.write(
            f"{name:18} first {first[name]:5.2f} s, then {median:6.2f} ms; "
            f"{AT_ONCE} at once: {many:6.2f} ms each\n"
        )
        await agent.close()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=200, help="of each kind, one at a time")
    asyncio.run(compare(parser.parse_args().agents))


if __name__ == "__main__":
    main()
