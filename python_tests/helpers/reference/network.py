"""A model's log-probabilities, entropies and values, from its weights in float64.

A is the number of response tokens of all rows, V of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call

from reference.rows import Row

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Adapter:
    """Matrices of LoRA by the name of the weight that they are added to.

    Args:
        a: (rank, in) of each weight.
        b: (out, rank) of each weight.
        scale: of their product.
    """

    a: dict[str, torch.Tensor]
    b: dict[str, torch.Tensor]
    scale: float

    def added_to(self, weights: Weights) -> dict[str, torch.Tensor]:
        merged = dict(weights)
        for name, a in self.a.items():
            merged[name] = weights[name] + self.scale * (self.b[name] @ a)
        return merged


def token_distributions(
    model: Any, weights: Weights, rows: Sequence[Row], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (A,) log-probabilities and (A,) entropies of the response tokens."""
    targets = []
    kept = []
    for row in rows:
        targets += row.response
        kept += row.kept
    scaled = _logits(model, weights, rows) / temperature
    scaled = scaled.masked_fill(_is_left_out(kept, scaled.shape[1]), -torch.inf)
    logprobs = torch.log_softmax(scaled, -1)
    picked = logprobs.gather(1, torch.tensor(targets, dtype=torch.long)[:, None])[:, 0]
    finite = logprobs.masked_fill(logprobs == -torch.inf, 0.0)
    return picked, -(logprobs.exp() * finite).sum(-1)


def vocabulary_logprobs(
    model: Any, weights: Weights, rows: Sequence[Row], temperature: float
) -> torch.Tensor:
    """Return (A, V) log-probabilities of all tokens in the place of each response token."""
    return torch.log_softmax(_logits(model, weights, rows) / temperature, -1)


def _logits(model: Any, weights: Weights, rows: Sequence[Row]) -> torch.Tensor:
    """Return (A, V) logits that predict the response tokens."""
    ids = _padded([row.tokens for row in rows])
    arguments = {"input_ids": ids, "use_cache": False}
    logits = functional_call(model, dict(weights), (), arguments).logits
    width = ids.shape[1]
    states = []
    for number, row in enumerate(rows):
        first = len(row.prompt)
        states += [number * width + first + place - 1 for place in range(len(row.response))]
    return logits.flatten(0, 1)[torch.tensor(states, dtype=torch.long)]


def token_values(backbone: Any, weights: Weights, head: torch.Tensor, rows: Sequence[Row]) -> Any:
    """Return (A,) values of the states before the response tokens.

    Args:
        head: (1, H) of the last hidden states.
    """
    ids = _padded([row.tokens for row in rows])
    arguments = {"input_ids": ids, "use_cache": False}
    hidden = functional_call(backbone, dict(weights), (), arguments).last_hidden_state
    values = hidden @ head[0]
    parts = [
        values[number, len(row.prompt) - 1 : len(row.tokens) - 1] for number, row in enumerate(rows)
    ]
    return torch.cat(parts)


def split_by_rows(values: torch.Tensor, rows: Sequence[Row]) -> list[list[float]]:
    lengths = [len(row.response) for row in rows]
    return [part.tolist() for part in values.split(lengths)]


def _padded(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return (N, L) ids; what follows a sequence does not change what comes before."""
    width = max(map(len, sequences))
    return torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in sequences])


def _is_left_out(kept: Sequence[Sequence[int]], vocabulary: int) -> torch.Tensor:
    """Return (A, V): whether a token was not among those that it was sampled from."""
    left_out = torch.zeros(len(kept), vocabulary, dtype=torch.bool)
    for place, ids in enumerate(kept):
        if ids:
            left_out[place] = True
            left_out[place, list(ids)] = False
    return left_out
