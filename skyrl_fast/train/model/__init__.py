"""Models and their passes: policy, critic, optimizer, micro-batches."""
