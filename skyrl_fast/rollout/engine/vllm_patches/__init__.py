"""Patches of vLLM: changes of its internals."""
