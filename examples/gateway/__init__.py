"""Agents that are trained through the gateway."""
