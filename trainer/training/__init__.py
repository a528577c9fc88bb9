"""The training loop, evaluation, checkpoints and results of a worker."""
