"""Inference engines: vLLM in this process, servers, weights."""
