"""Complete example runs; `tiny_model` contains their shared code."""
