"""Training time between two saves; the trainer applies it, and quotes include it.

    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C

is Daly's estimate of the interval with the least lost time (A higher order estimate of the optimum checkpoint interval
for restart dumps, FGCS 22, 2006, equation 37). Its first order is Young's sqrt(2 C M) (CACM 17, 1974). C is the cost of
a save, M the mean time between losses. C counts all work of a snapshot and its upload. Training continues during the
upload, so C is too high and the interval rather too long. The interval never exceeds the loss that the user accepts.
"""

import math
from collections.abc import Iterable

from trainer.contract import object_keys
from trainer.contract.train import MAX_FREQUENCY, CheckpointConfig

SLACK_S = 1.0


def daly_s(cost_s: float, losses_per_hour: float) -> float:
    """Return Daly's interval in seconds; infinite if no losses are expected."""
    if losses_per_hour <= 0:
        return math.inf
    mean_s = 3600 / losses_per_hour
    if cost_s >= 2 * mean_s:
        return mean_s
    share = cost_s / (2 * mean_s)
    return math.sqrt(2 * cost_s * mean_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def interval_s(cost_s: float, losses_per_hour: float, max_loss_s: float) -> float:
    """Return seconds between the starts of two saves, each of which takes `cost_s`.

    The work at risk then stays within `max_loss_s`, the limit of the user. If a save takes more than half of the limit,
    the next save follows at once.
    """
    target_s = min(daly_s(cost_s, losses_per_hour), max_loss_s - cost_s)
    return max(target_s, min(max_loss_s, max(max_loss_s / MAX_FREQUENCY, cost_s)))


def interval_message(cost_s: float, losses_per_hour: float, config: CheckpointConfig) -> str:
    """Return the interval and its reasons, for the log."""
    most_s = config.max_loss_s
    interval = interval_s(cost_s, losses_per_hour, most_s)
    best = daly_s(cost_s, losses_per_hour)
    words = f"saves every {interval:.0f} s, as a save takes {cost_s:.2f} s"
    if math.isfinite(best):
        words += f" and a loss is expected every {1 / losses_per_hour:.3g} h (Daly: {best:.0f} s)"
    if interval + cost_s > most_s + SLACK_S:
        return (
            f"{words}; up to {interval + cost_s:.0f} s may be lost, more than the {most_s:.0f} s of checkpoint.every_s"
        )
    return f"{words}; at most {most_s:.0f} s of work may be lost"


def milestones(checkpoints: Iterable[str], every: int | None) -> frozenset[str]:
    """Return the manifests of the first checkpoint at or after each multiple of `every` steps.

    `every` None returns none. Since the first checkpoint of each interval stays, pruning other checkpoints does not
    change the result.
    """
    if every is None:
        return frozenset()
    first: dict[int, tuple[int, str]] = {}
    for key in object_keys.manifests(checkpoints):
        step = object_keys.step_of(key)
        stretch = step // every
        if stretch:
            first[stretch] = min(first.get(stretch, (step, key)), (step, key))
    return frozenset(key for _, key in first.values())
