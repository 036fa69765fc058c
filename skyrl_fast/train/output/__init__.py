"""Checkpoints, loggers, progress, plots."""
