"""Steps that go wrong: left out, undone, or the end of the job, by policy; and those that only look strange.

All of it is a pure function of the steps so far and part of the checkpoint, so a run that was interrupted judges as
one that was not. Going back leads to a step, not to whichever checkpoint was the last: from an older one the steps up
to there are computed once more, bit by bit. Then the rows of the bad passage are left out (as by Chowdhery et al.
2022, PaLM, section 5.1, who went back about 100 steps and left out 200 to 500 batches).
"""

import math
from statistics import median
from typing import Literal

from trainer.contract.checkpoint_format import GuardState, Progress, RowSkip
from trainer.contract.guard import GuardConfig

WINDOW = 64
"""Latest good steps that a new one is held against."""
ENOUGH = 16
"""The first steps are noise."""
NORMAL = 1.4826
"""Standard deviations of a normal distribution in its median absolute deviation."""
LEAST = 0.02
"""Of the median: less is no deviation, as where a loss stands still."""

LEAST_SCALE = 1.0
"""Of fp16's losses. The search for a scale halves it from 65536 until gradients are finite, which is far above this;
what overflows below it is not of the scale's making."""

Verdict = Literal["go", "skip", "back", "stop"]


class Rollback(Exception):
    """The training is to go on from an earlier step; raised where the loop can be left."""

    def __init__(self, jumps: tuple[RowSkip, ...]) -> None:
        super().__init__(f"back to step {jumps[-1].step}")
        self.jumps = jumps


def check_step(config: GuardConfig, progress: Progress, loss: float, norm: float) -> tuple[Verdict, GuardState, str]:
    """What becomes of the step that has just been computed: (verdict, the state after it, what to tell people)."""
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
    """All jumps of the way that leads past the bad steps of `progress`, the newest last."""
    target = max(0, progress.step - progress.guard.bad_steps - config.back_steps)
    return (*progress.guard.row_skips, RowSkip(step=target, samples=progress.samples + global_batch))


def skip_rows(progress: Progress, jumps: tuple[RowSkip, ...]) -> Progress:
    """`progress` with the jumps that are due before its next step: a step begun with other rows begins anew."""
    for jump in jumps:
        if jump.step == progress.step and jump not in progress.guard.row_skips:
            care = progress.guard.model_copy(update={"row_skips": (*progress.guard.row_skips, jump)})
            ahead = max(progress.samples, jump.samples)
            progress = progress.model_copy(
                update={"care": care, "samples": ahead, "micro_batch_index": 0, "micro_loss": 0.0}
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
