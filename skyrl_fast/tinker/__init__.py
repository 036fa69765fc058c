"""A server for the unmodified Tinker SDK: training and sampling of LoRA adapters on one model."""
