"""New weights for a running engine: transfers, workers that load them, verification."""
