"""Threads, processes and nodes in which environments and agents run."""
