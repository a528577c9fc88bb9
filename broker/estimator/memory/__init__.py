"""Peak memory of a training step. Pure."""
