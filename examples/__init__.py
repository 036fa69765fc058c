"""Complete runs to read and to start from; `tiny_model` holds what they share."""
