"""Step-wise reinforcement learning of language-model agents, fast and right."""

from __future__ import annotations

from skyrl_fast.ops.advantage import group_advantage
from skyrl_fast.ops.logprob import linear_logprob, selected_logprob

__version__ = "0.1.0"

__all__ = ["__version__", "group_advantage", "linear_logprob", "selected_logprob"]
