"""A training step in plain Python, written from docs/spec.md alone.

It computes in float64, one row and one token after the other, and imports nothing of `skyrl_fast`
but types of data. `python_tests/train/test_reference_step.py` compares the trainer with it.
"""
