"""Ways of new weights to an engine: each sends on the trainer's side and receives on a worker's."""
