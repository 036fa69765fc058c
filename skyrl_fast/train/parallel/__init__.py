"""Several ranks that share one update."""
