"""Asynchronous training, shown: against synchronous, killed, disturbed, by two servers."""
