"""How long to train between two saves. The trainer keeps to it, and a quote counts on it.

    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C

is Daly's estimate (A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22, 2006,
equation 37) of what loses least time, Young's sqrt(2 C M) (CACM 17, 1974) in the first order: C is what a save costs,
M the mean time between losses. C is taken as all the work of a snapshot and its upload. Training goes on meanwhile,
so that is too much, and the interval rather too long; but never longer than what the user may lose.
"""

import math

from trainer.contract.train import OFTENER, CheckpointConfig

SLACK_S = 1.0


def daly_s(cost_s: float, losses_per_hour: float) -> float:
    """Seconds; infinite where nothing is ever lost."""
    if losses_per_hour <= 0:
        return math.inf
    mean_s = 3600 / losses_per_hour
    if cost_s >= 2 * mean_s:
        return mean_s
    share = cost_s / (2 * mean_s)
    return math.sqrt(2 * cost_s * mean_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def interval_s(cost_s: float, losses_per_hour: float, most_s: float) -> float:
    """Seconds between the beginnings of two saves, each of which takes `cost_s`: with that the work that may be lost
    is the `most_s` that the user allows, unless a save takes more than half of it; then the next one follows at
    once.
    """
    wanted = min(daly_s(cost_s, losses_per_hour), most_s - cost_s)
    return max(wanted, min(most_s, max(most_s / OFTENER, cost_s)))


def told(cost_s: float, losses_per_hour: float, config: CheckpointConfig) -> str:
    """The interval and where it comes from, for people."""
    most_s = config.most_s
    chosen = interval_s(cost_s, losses_per_hour, most_s)
    best = daly_s(cost_s, losses_per_hour)
    words = f"saves every {chosen:.0f} s, as a save takes {cost_s:.2f} s"
    if math.isfinite(best):
        words += f" and a loss is expected every {1 / losses_per_hour:.3g} h (Daly: {best:.0f} s)"
    if chosen + cost_s > most_s + SLACK_S:
        return f"{words}; up to {chosen + cost_s:.0f} s may be lost, more than the {most_s:.0f} s of checkpoint.every_s"
    return f"{words}; at most {most_s:.0f} s of work may be lost"
