"""The trainer: policy, optimizer, checkpoints, metric sinks and the one loop that ties them."""
