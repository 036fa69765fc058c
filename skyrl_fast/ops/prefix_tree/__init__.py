"""Prefix trees of rows, and attention over them."""
