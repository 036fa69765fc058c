"""Ops on tensors: packing, advantages, log-probabilities, losses. Nothing here knows rollouts."""

from skyrl_fast.ops import _backend, first_use

_backend.compare_by(first_use.check_first_use)
