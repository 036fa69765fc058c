"""Policy losses of log-probabilities, their reductions and corrections."""
