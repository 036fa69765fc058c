"""Memory of a run on its GPUs: planned before anything is loaded, and its measured peak."""
