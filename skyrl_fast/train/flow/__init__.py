"""Data flow of a run: groups, batches, rollouts."""
