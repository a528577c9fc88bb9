"""Reaction to bad steps by policy (skip, roll back, fail), and detection of unusual steps.

The rules are pure functions of the steps so far and part of the checkpoint, so an interrupted run decides as an
uninterrupted one. A rollback has a target step. The worker recomputes the steps from an older checkpoint to that step,
bit by bit, and then skips the rows of the bad steps. Chowdhery et al. 2022 (PaLM, section 5.1) did so, went back about
100 steps and left out 200 to 500 batches.
"""

import math
from statistics import median
from typing import Literal

from trainer.contract.checkpoint_format import GuardState, Progress, RowSkip
from trainer.contract.guard import GuardConfig

WINDOW = 64
"""Number of latest good steps with which a new step is compared."""
ENOUGH = 16
"""Number of good steps before the first comparison, because early steps are noisy; also steps between two reports."""
NORMAL = 1.4826
"""Standard deviation of a normal distribution per median absolute deviation."""
LEAST = 0.02
"""Smallest spread as a share of the median; a constant loss would otherwise have none."""

LEAST_SCALE = 1.0
"""Smallest loss scale of fp16. The search for a scale halves it from 65536 until gradients are finite, far above
this value. An overflow below it is not caused by the scale.
"""

Verdict = Literal["go", "skip", "back", "stop"]


class Rollback(Exception):
    """The training must resume from an earlier step; raised to leave the loop."""

    def __init__(self, jumps: tuple[RowSkip, ...]) -> None:
        super().__init__(f"back to step {jumps[-1].step}")
        self.jumps = jumps


def check_step(config: GuardConfig, progress: Progress, loss: float, norm: float) -> tuple[Verdict, GuardState, str]:
    """Judge the computed step; return (verdict, state after the step, message for the user)."""
    care, step = progress.guard, progress.step + 1
    if math.isfinite(loss) and math.isfinite(norm):
        after, told = _watched(config, care, step, loss, norm)
        return "go", after, told
    what = f"step {step}: {'the loss' if not math.isfinite(loss) else 'the norm of the gradients'} is no finite number"
    row = care.bad_steps + 1
    after = care.model_copy(update={"bad_steps": row, "skipped": care.skipped + 1})
    if row <= config.skip:
        return "skip", after, f"{what}; its rows are left out, {row} of {config.skip} in a row"
    if len(care.row_skips) < config.rollbacks:
        target = max(0, progress.step - care.bad_steps - config.back_steps)
        return "back", after, f"{what}, {row} in a row; going back to step {target} and on after these rows"
    fix = "lower train.optim.lr, look for broken rows, or raise train.guard"
    return "stop", after, f"{what}, {row} in a row, after {len(care.row_skips)} times back; {fix}"


def rollback_plan(config: GuardConfig, progress: Progress, global_batch: int) -> tuple[RowSkip, ...]:
    """Return all row skips of a training that avoids the bad steps of `progress`, the newest last."""
    target = max(0, progress.step - progress.guard.bad_steps - config.back_steps)
    return (*progress.guard.row_skips, RowSkip(step=target, samples=progress.samples + global_batch))


def skip_rows(progress: Progress, jumps: tuple[RowSkip, ...]) -> Progress:
    """Return `progress` with the row skips that are due before its next step.

    A step that began with other rows starts again.
    """
    for jump in jumps:
        if jump.step == progress.step and jump not in progress.guard.row_skips:
            care = progress.guard.model_copy(update={"row_skips": (*progress.guard.row_skips, jump)})
            ahead = max(progress.samples, jump.samples)
            progress = progress.model_copy(
                update={"guard": care, "samples": ahead, "micro_batch_index": 0, "micro_loss": 0.0}
            )
    return progress


def _watched(config: GuardConfig, care: GuardState, step: int, loss: float, norm: float) -> tuple[GuardState, str]:
    strange = [
        f"{name} {value:.4g} where the median of {len(before)} steps is {median(before):.4g}"
        for name, value, before in (("loss", loss, care.losses), ("gradient norm", norm, care.norms))
        if _stands_out(value, before, config.deviations)
    ]
    tell = bool(strange) and step >= care.reported_at + ENOUGH
    after = care.model_copy(
        update={
            "bad_steps": 0,
            "losses": (*care.losses, loss)[-WINDOW:],
            "norms": (*care.norms, norm)[-WINDOW:],
            "reported_at": step if tell else care.reported_at,
        }
    )
    return after, f"step {step}: {' and '.join(strange)}" if tell else ""


def _stands_out(value: float, before: tuple[float, ...], deviations: float) -> bool:
    if len(before) < ENOUGH:
        return False
    middle = median(before)
    spread = max(NORMAL * median(abs(b - middle) for b in before), LEAST * abs(middle))
    return value > middle + deviations * spread
