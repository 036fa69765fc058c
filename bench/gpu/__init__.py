"""GPU benchmarks: ours, the peers and the floors, in one run."""
