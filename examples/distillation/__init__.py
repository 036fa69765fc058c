"""Distillation: a student learns from the probabilities of a teacher."""
