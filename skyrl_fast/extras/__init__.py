"""Extras with their own dependencies; the core names them in tables and does not import them."""
