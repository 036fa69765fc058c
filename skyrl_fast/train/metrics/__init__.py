"""Metrics of rollouts, rewards and rows: what a step reports of its batch."""
