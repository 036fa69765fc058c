"""Extras with their own dependencies; the core does not import them."""
