"""Benchmarks of every op against the alternatives in use."""
