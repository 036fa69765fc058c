"""Ops on tensors: packing, advantages, log-probabilities, losses. Nothing here knows rollouts."""
