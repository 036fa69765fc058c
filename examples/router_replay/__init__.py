"""The effect of router replay, measured on a tiny mixture of experts."""
