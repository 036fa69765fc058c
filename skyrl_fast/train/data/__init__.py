"""Prompts, schedules, random state."""
