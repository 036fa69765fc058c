"""The trainer: policy, optimizer, checkpoints and the loop that joins them with rollouts."""
