"""How the calls of a trajectory follow from each other: a forest, found from their tokens.

An agent may continue a conversation, go back in it, change an answer, or begin another one: a
sub-agent, or a context that was compacted. An environment's calls are a line.

Design: docs/design/021-gateway.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from skyrl_fast.rollout.token_ids import count_shared, ids_array
from skyrl_fast.trajectory_store.reader import StoredStep

STARTS = "starts"  # has no answer of an earlier call, and no complete prompt
CONTINUES = "continues"  # begins with the prompt and the answer of its parent
FORKS = "forks"  # begins with its parent's prompt and at least half of its answer
REWRITES = "rewrites"  # begins with its parent's prompt, and continues with another answer
REPEATS = "repeats"  # has the prompt of an earlier call: another answer to it


@dataclass(frozen=True, slots=True)
class Place:
    """A call's place in the forest: how (`kind`) it follows from call number `parent`, if any."""

    kind: str
    parent: int | None


@dataclass(slots=True, eq=False)
class _Edge:
    """Tokens in a row of the prefix tree.

    Args:
        tokens: at least one.
        asked: the call whose prompt ends after them.
        answered: the call whose answer ends after them.
        next: edges after them, by their first token.
    """

    tokens: np.ndarray
    sampled_by: int | None = None
    asked: int | None = None
    answered: int | None = None
    next: dict[int, _Edge] = field(default_factory=dict)

    def split(self, at: int) -> None:
        """Divide the edge; what it says of its end moves to the second part."""
        rest = _Edge(self.tokens[at:], self.sampled_by, self.asked, self.answered, self.next)
        self.tokens = self.tokens[:at]
        self.asked = None
        self.answered = None
        self.next = {int(rest.tokens[0]): rest}


def forest(steps: Sequence[StoredStep]) -> list[Place]:
    roots: dict[int, _Edge] = {}
    places: list[Place] = []
    for number, step in enumerate(steps):
        prompt = ids_array(step.prompt_token_ids)
        response = ids_array(step.response_ids)
        path, rest = _walk(roots, prompt)
        places.append(_place(path, len(rest), steps))
        path += _add_edge(path[-1].next if path else roots, rest)
        if path and path[-1].asked is None:
            path[-1].asked = number
        if path:
            start = path[-1].next
        else:
            start = roots
        answer, rest = _walk(start, response)
        answer += _add_edge(answer[-1].next if answer else start, rest)
        for edge in answer:
            if edge.sampled_by is None:
                edge.sampled_by = number
        if answer:
            answer[-1].answered = number
    return places


def _walk(edges: dict[int, _Edge], tokens: np.ndarray) -> tuple[list[_Edge], np.ndarray]:
    """Return the edges that the tokens begin with, the last one divided there, and the rest."""
    path: list[_Edge] = []
    while len(tokens) and (edge := edges.get(int(tokens[0]))) is not None:
        shared = count_shared(edge.tokens, tokens)
        if shared < len(edge.tokens):
            edge.split(shared)
        path.append(edge)
        tokens = tokens[shared:]
        edges = edge.next
    return path, tokens


def _add_edge(edges: dict[int, _Edge], tokens: np.ndarray) -> list[_Edge]:
    if not len(tokens):
        return []
    edge = _Edge(tokens)
    edges[int(tokens[0])] = edge
    return [edge]


def _place(path: Sequence[_Edge], num_new: int, steps: Sequence[StoredStep]) -> Place:
    if path and not num_new and path[-1].asked is not None:
        return Place(REPEATS, path[-1].asked)
    depth = sum(len(edge.tokens) for edge in path)
    for edge in reversed(path):
        if edge.answered is not None:
            return Place(CONTINUES, edge.answered)
        if edge.sampled_by is not None:
            parent = steps[edge.sampled_by]
            common = depth - len(parent.prompt_token_ids)
            if 2 * common >= len(parent.response_ids):
                kind = FORKS
            else:
                kind = REWRITES
            return Place(kind, edge.sampled_by)
        if edge.asked is not None:
            return Place(REWRITES, edge.asked)
        depth -= len(edge.tokens)
    return Place(STARTS, None)
