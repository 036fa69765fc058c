"""RL algorithms: advantages, filters, corrections."""
