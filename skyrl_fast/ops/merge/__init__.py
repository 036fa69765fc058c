"""Merging steps whose context only grew."""
