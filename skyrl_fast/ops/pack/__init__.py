"""Ragged rows to padded or flat tensors and back."""
