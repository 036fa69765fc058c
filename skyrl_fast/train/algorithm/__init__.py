"""What RL decides: advantages, filters, corrections."""
