"""What router replay gains, measured on a tiny mixture of experts."""
