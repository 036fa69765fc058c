"""Ranks that share the update: processes, calls, sharded weights, micro-batches."""
