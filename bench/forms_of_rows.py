"""Tokens that a forward pass processes, and sampled tokens that are trained, of a stored run.

    python -m bench.forms_of_rows RUN [--step 5]

Five ways to train on calls that form a forest: every call as a row; rows joined where the context
only grew; of each trajectory the longest chain of such calls; its last chain; and prefix trees. The
chains that are left out are not trained.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from skyrl_fast.trajectory_store.reader import StoredStep, StoredTrajectory, read_trajectories

Chain = list[StoredStep]


def chains_of(trajectory: StoredTrajectory) -> list[Chain]:
    """Return the calls in chains: each begins with the tokens of the one before it."""
    chains: list[Chain] = []
    for step in trajectory.steps:
        for chain in chains:
            before = [*chain[-1].prompt_token_ids, *chain[-1].response_ids]
            if step.prompt_token_ids[: len(before)] == before:
                chain.append(step)
                break
        else:
            chains.append([step])
    return chains


def length(step: StoredStep) -> int:
    """Return the tokens of a row."""
    return len(step.prompt_token_ids) + len(step.response_ids)


def sampled(steps: Sequence[StoredStep]) -> int:
    """Return the sampled tokens of calls."""
    return sum(len(step.response_ids) for step in steps)


def nodes(trajectories: Sequence[StoredTrajectory]) -> int:
    """Return the distinct prefixes of a group's rows."""
    root: dict[int, dict] = {}
    count = 0
    for trajectory in trajectories:
        for step in trajectory.steps:
            node = root
            for token in (*step.prompt_token_ids, *step.response_ids):
                if token not in node:
                    node[token] = {}
                    count += 1
                node = node[token]
    return count


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, help="of the run; default: the last one")
    options = parser.parse_args()
    found = list(read_trajectories(options.run, phase="train"))
    last = max(t.entry.step for t in found) if options.step is None else options.step
    found = [t for t in found if t.entry.step == last]
    groups: dict[str, list[StoredTrajectory]] = defaultdict(list)
    for trajectory in found:
        groups[trajectory.entry.uid].append(trajectory)
    steps = [step for t in found for step in t.steps]
    chains = [chains_of(t) for t in found]
    longest = [max(c, key=lambda chain: length(chain[-1])) for c in chains]
    final = [
        next(chain for chain in c if chain[-1] is t.steps[-1])
        for c, t in zip(chains, found, strict=True)
    ]
    ends = [chain[-1] for c in chains for chain in c]
    table = [
        ("all calls as rows", sum(map(length, steps)), sampled(steps)),
        ("all calls, joined rows", sum(map(length, ends)), sampled(steps)),
        ("longest chain", sum(length(c[-1]) for c in longest), sum(map(sampled, longest))),
        ("last chain", sum(length(c[-1]) for c in final), sum(map(sampled, final))),
        ("all calls, prefix trees", sum(map(nodes, groups.values())), sampled(steps)),
    ]
    print(f"step {last}: {len(found)} trajectories, {len(steps)} calls, {len(ends)} chains\n")
    print("| form | tokens processed | sampled tokens trained |\n|---|---|---|")
    for name, tokens, trained in table:
        print(f"| {name} | {tokens:,} | {trained:,} ({trained / sampled(steps):.0%}) |")


if __name__ == "__main__":
    main()
