"""Replacements of functions of other training systems: SkyRL, verl, TRL."""
