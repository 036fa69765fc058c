"""Asynchronous training: compared with synchronous, killed, with faults, with two servers."""
