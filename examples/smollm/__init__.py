"""SmolLM2, a real pretrained model, trained offline."""
