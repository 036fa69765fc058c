"""What happens when: groups, batches, rollouts."""
