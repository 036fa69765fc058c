"""Benches on an NVIDIA GPU: ours, the peers, and the floors, in one run."""
