"""Trials of Harbor as agents at the gateway."""
