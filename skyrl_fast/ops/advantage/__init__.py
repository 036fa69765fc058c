"""Advantages per trajectory, turn or token."""
