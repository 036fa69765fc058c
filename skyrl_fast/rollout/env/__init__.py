"""Environments: the protocol, and the threads that run them."""
