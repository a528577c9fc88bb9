"""Ratings of answers for KTO: what is refused and what is advised, before a purchase and in training alike."""

from trainer.contract.train import KtoConfig

PARTS = (1.0, 4 / 3)
"""Weight of all good answers over that of all bad ones, from and to: advice of the paper's section 4.2 and of TRL."""
ROUNDING = 0.01
"""Share by which the ratio may leave PARTS, because a weight of the advice is rounded."""
LONE_ANSWER = "kto compares the answers of a step with each other; give at least 2"
"""Error for one answer in a step, worded to follow `global_batch`."""


def one_sided_message(column: str, *, good: bool) -> str:
    """Return the error for ratings that are all equal, and the fix."""
    return f"data.label: column {column!r} is {str(good).lower()} in every row; give good answers and bad ones"


def unbalanced_message(kto: KtoConfig, good: int, bad: int) -> str:
    """Return the advice for weights that do not balance unequal numbers of answers; otherwise an empty text."""
    if not good or not bad or good == bad:
        return ""
    ratio = kto.desirable_weight * good / (kto.undesirable_weight * bad)
    if PARTS[0] * (1 - ROUNDING) <= ratio <= PARTS[1] * (1 + ROUNDING):
        return ""
    better = [kto.undesirable_weight * bad * part / good for part in PARTS]
    worse = [kto.desirable_weight * good / (bad * part) for part in reversed(PARTS)]
    return (
        f"{good:,} answers are good and {bad:,} are bad, and their weights differ by the factor {ratio:.3g}; set "
        f"kto.desirable_weight from {better[0]:.3g} to {better[1]:.3g}, or kto.undesirable_weight from {worse[0]:.3g} "
        f"to {worse[1]:.3g}"
    )
