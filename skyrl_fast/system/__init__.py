"""Locks, processes, sockets and folders: what knows nothing of learning."""
