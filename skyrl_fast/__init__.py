"""Step-wise reinforcement learning of language-model agents, fast and right."""

from __future__ import annotations

from skyrl_fast.ops.advantage import group_advantage

__version__ = "0.1.0"

__all__ = ["__version__", "group_advantage"]
