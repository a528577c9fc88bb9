"""Training loop, evaluation, checkpoints and results of a worker."""
