"""Compaction: a task whose facts do not fit into the context."""
