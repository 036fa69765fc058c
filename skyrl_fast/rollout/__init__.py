"""Trajectories: environments, the agent loop, and the vLLM engine that samples for it."""
