"""Checkpoints of a run: written, verified, found again, on a disk or at a URL."""
