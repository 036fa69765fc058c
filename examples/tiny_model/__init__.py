"""What the examples share: a tiny tokenizer and model, their warm start, and the run's frame."""
