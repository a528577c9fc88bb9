"""Reaction to bad steps by policy (skip, roll back, fail), and detection of unusual steps.

The rules are pure functions of the steps so far, which the checkpoint records, so a resumed run decides as an
uninterrupted one. A rollback has a target step. The worker restores an older checkpoint, recomputes the steps up to the
target with identical bits, and then skips the rows of the bad steps. Chowdhery et al. 2022 (PaLM, section 5.1) did so,
went back about 100 steps and left out 200 to 500 batches.
"""

import math
from statistics import median
from typing import Any, Literal, NamedTuple

from trainer.contract.checkpoint_format import GuardState, Progress, RowSkip
from trainer.contract.guard import GuardConfig

WINDOW = 64
"""Number of latest good steps with which a new step is compared."""
MIN_GOOD_STEPS = 16
"""Number of good steps before the first comparison, because early steps are noisy. Also the smallest number of steps
between two reports.
"""
NORMAL = 1.4826
"""Standard deviation of a normal distribution per median absolute deviation."""
MIN_SPREAD_SHARE = 0.02
"""Smallest spread as a share of the median; a constant loss would otherwise have none."""

MIN_SCALE = 1.0
"""Smallest loss scale of fp16. The search for a scale halves it from 65536 until gradients are finite, far above
this value. An overflow below it is not caused by the scale.
"""

Verdict = Literal["go", "skip", "back", "stop"]
EVENTS: dict[Verdict, str] = {"go": "spike", "skip": "skipped", "back": "rolled_back", "stop": "diverged"}


class Rollback(Exception):
    """The training must resume from an earlier step; raised to leave the loop."""

    def __init__(self, jumps: tuple[RowSkip, ...]) -> None:
        super().__init__(f"back to step {jumps[-1].step}")
        self.jumps = jumps


class StepDecision(NamedTuple):
    """Decision on a computed step: update, skip the update, roll back, or fail."""

    verdict: Verdict
    state: GuardState
    """State after the step."""
    message: str
    """Message for the user; empty: nothing to report."""

    @property
    def event(self) -> str:
        """Kind of the message, as in `AgentMessage`."""
        return EVENTS[self.verdict]


def check_step(config: GuardConfig, progress: Progress, loss: float, norm: float) -> StepDecision:
    """Return the decision on the step after `progress`, from its loss and gradient norm."""
    before, step = progress.guard, progress.step + 1
    if math.isfinite(loss) and math.isfinite(norm):
        after, message = _good_step(config, before, step, loss, norm)
        return StepDecision("go", after, message)
    measure = "the loss" if not math.isfinite(loss) else "the norm of the gradients"
    what = f"step {step}: {measure} is not a finite number"
    bad_steps = before.bad_steps + 1
    after = before.model_copy(update={"bad_steps": bad_steps, "skipped": before.skipped + 1})
    if bad_steps <= config.skip:
        message = f"{what}; its rows are left out, {bad_steps} of {config.skip} in a row"
        return StepDecision("skip", after, message)
    if len(before.row_skips) < config.rollbacks:
        target = _target(config, progress)
        message = f"{what}, {bad_steps} in a row; going back to step {target}, then on without these rows"
        return StepDecision("back", after, message)
    fix = "lower train.optim.lr, look for broken rows, or raise train.guard"
    message = f"{what}, {bad_steps} in a row, after {len(before.row_skips)} rollbacks; {fix}"
    return StepDecision("stop", after, message)


def check_scaled_step(config: GuardConfig, progress: Progress, loss: float, norm: float, scaler: Any) -> StepDecision:
    """Return the decision on a step of fp16 with its gradient scaler; None: no scaler.

    An overflow of the gradients alone is not a bad step: the scaler skips the step and halves the scale.
    """
    overflowed = scaler is not None and math.isfinite(loss) and not math.isfinite(norm)
    if overflowed and scaler.get_scale() >= MIN_SCALE:
        norm = 0.0
    return check_step(config, progress, loss, norm)


def rollback_plan(config: GuardConfig, progress: Progress, global_batch: int) -> tuple[RowSkip, ...]:
    """Return all row skips of a training that avoids the bad steps of `progress`, the newest last."""
    skip = RowSkip(step=_target(config, progress), samples=progress.samples + global_batch)
    return (*progress.guard.row_skips, skip)


def _target(config: GuardConfig, progress: Progress) -> int:
    """Return the step to which a rollback returns."""
    return max(0, progress.step - progress.guard.bad_steps - config.back_steps)


def skip_rows(progress: Progress, jumps: tuple[RowSkip, ...]) -> Progress:
    """Return `progress` with the row skips that are due before its next step.

    A step that began with other rows starts again.
    """
    for jump in jumps:
        if jump.step == progress.step and jump not in progress.guard.row_skips:
            state = progress.guard.model_copy(update={"row_skips": (*progress.guard.row_skips, jump)})
            samples = max(progress.samples, jump.samples)
            progress = progress.model_copy(
                update={"guard": state, "samples": samples, "micro_batch_index": 0, "micro_loss": 0.0}
            )
    return progress


def _good_step(config: GuardConfig, before: GuardState, step: int, loss: float, norm: float) -> tuple[GuardState, str]:
    """Return the state after a step with finite numbers, and a message if one of them is unusual."""
    unusual = [
        f"{name} {value:.4g} where the median of {len(earlier)} steps is {median(earlier):.4g}"
        for name, value, earlier in (("loss", loss, before.losses), ("gradient norm", norm, before.norms))
        if _is_unusual(value, earlier, config.deviations)
    ]
    reported = bool(unusual) and step >= before.reported_at + MIN_GOOD_STEPS
    after = before.model_copy(
        update={
            "bad_steps": 0,
            "losses": (*before.losses, loss)[-WINDOW:],
            "norms": (*before.norms, norm)[-WINDOW:],
            "reported_at": step if reported else before.reported_at,
        }
    )
    return after, f"step {step}: {' and '.join(unusual)}" if reported else ""


def _is_unusual(value: float, earlier: tuple[float, ...], deviations: float) -> bool:
    if len(earlier) < MIN_GOOD_STEPS:
        return False
    middle = median(earlier)
    spread = max(NORMAL * median(abs(x - middle) for x in earlier), MIN_SPREAD_SHARE * abs(middle))
    return value > middle + deviations * spread
