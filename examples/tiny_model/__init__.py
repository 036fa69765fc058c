"""Shared code of the examples: a tiny tokenizer and model, their warm start, the command line."""
