"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

import math

from trainer.contract.train import TrainConfig


def total_steps(config: TrainConfig, rows: int) -> int:
    """Optimizer steps of the whole job over `rows` training rows."""
    if config.max_steps is not None:
        return config.max_steps
    return max(1, math.ceil(config.epochs * rows / config.rows_a_step))


def learning_rate(peak: float, warmup_share: float, step: int, total: int) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up, then cosine to zero (Loshchilov, Hutter 2017, eq. 5)."""
    warmup = round(warmup_share * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
