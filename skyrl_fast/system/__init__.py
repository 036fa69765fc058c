"""Locks, processes, tasks, sockets and folders: what knows nothing of learning."""
