"""Reinforcement learning by the Tinker SDK."""
