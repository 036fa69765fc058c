"""What torch computes: policy, critic, micro-batches."""
