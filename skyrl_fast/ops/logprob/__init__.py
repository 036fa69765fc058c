"""Log-probabilities of selected tokens, and the loss computed from logits."""
