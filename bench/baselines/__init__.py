"""Baselines: the code of other systems, imported or restated."""
