"""Chances that spot capacity of a market disappears or returns, by the time since its last change.

A market is a zone, a GPU and a number of machines, or a union of zones. It is up while spot machines can be bought.
Hazards are a pooled shape over ages times a factor of the market itself, its frailty. The frailty has a Gamma prior of
mean 1, which the market's own events and exposure update (the conjugate form of `preemption_rate`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import merge
from math import log
from typing import Final

from broker.domain.offer import Offer

TICK_MIN: Final = 10.0
"""Minutes to which the hazards of `PRIOR_FALL` and `PRIOR_RISE` refer."""
AGES_MIN: Final = (0.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 960.0)
"""First minute of each age class; the last class has no end."""
PRIOR_FALL: Final = (0.26, 0.19, 0.15, 0.09, 0.06, 0.04, 0.027, 0.013)
"""Chance in ten minutes that an available market becomes unavailable, by age class.

Fitted on pools of AWS: K80 and V100 in October 2022, and two thirds of a trace of p3.2xlarge in February 2023.
"""
PRIOR_RISE: Final = (0.33, 0.23, 0.18, 0.13, 0.065, 0.061, 0.034, 0.011)
"""Chance in ten minutes that an unavailable market becomes available, by age class; fitted on the same markets."""
STRENGTH: Final = 6.0
"""Weight of the prior: the number of own events after which a market's history weighs as much."""
HALF_LIFE_MIN: Final = 5 * 24 * 60.0
"""Minutes after which an event or an exposure weighs half."""
FACTOR_STEP: Final = 1.5
"""Ratio of neighbouring values of a rounded frailty."""
MAX_FACTOR_STEPS: Final = 5
UNKNOWN_AGE_MIN: Final = 40.0
"""Age of the state of a market that was not observed before."""

Market = tuple[str, str, str, str, int, int]
"""(provider, cloud, region, accelerator, GPUs of a machine, machines of the job)."""
Timeline = tuple[tuple[float, bool | None], ...]
"""Times in minutes at which a market was observed to have changed, with its new state, oldest first.

None: not observed.
"""


def market(offer: Offer, nodes: int) -> Market:
    """Return the market of a spot offer."""
    return offer.provider, offer.cloud, offer.region, offer.accelerator, offer.gpus, nodes


@dataclass(frozen=True, kw_only=True)
class MarketHistory:
    """Weighted events and exposure of one market, and its current state."""

    is_up: bool | None = True
    """None: the market is not observed."""
    age_min: float = 0.0
    """Minutes since the market entered its state; a lower limit if its start was not observed."""
    falls: float = 0.0
    """Weighted number of changes from up to down."""
    expected_falls: float = 0.0
    """Number of falls that the prior expects over the observed time."""
    rises: float = 0.0
    expected_rises: float = 0.0

    @property
    def fall_factor(self) -> float:
        """Return the expected ratio of the market's hazard of a fall to the prior."""
        return (STRENGTH + self.falls) / (STRENGTH + self.expected_falls)

    @property
    def rise_factor(self) -> float:
        """Return the expected ratio of the market's hazard of a rise to the prior."""
        return (STRENGTH + self.rises) / (STRENGTH + self.expected_rises)

    def after(self, minutes: float, *, is_up: bool | None) -> "MarketHistory":
        """Return the history after `minutes` more, at the end of which the market was found up, down or unobserved.

        Unobserved time is neither an exposure nor an event.
        """
        keep = 0.5 ** (minutes / HALF_LIFE_MIN)
        exposed = expected_events(PRIOR_FALL if self.is_up else PRIOR_RISE, self.age_min, minutes)
        age_min = UNKNOWN_AGE_MIN if self.is_up is None else 0.0
        return MarketHistory(
            is_up=is_up,
            age_min=self.age_min + minutes if is_up is self.is_up else age_min,
            falls=self.falls * keep + (self.is_up is True and is_up is False),
            expected_falls=self.expected_falls * keep + (exposed if self.is_up else 0.0),
            rises=self.rises * keep + (self.is_up is False and is_up is True),
            expected_rises=self.expected_rises * keep + (exposed if self.is_up is False else 0.0),
        )


def age_class(age_min: float) -> int:
    """Return the number of the age class."""
    return sum(age_min >= first for first in AGES_MIN) - 1


def expected_events(hazards: Sequence[float], age_min: float, minutes: float) -> float:
    """Return the sum of hazards over `minutes` that begin at an age."""
    total, end = 0.0, age_min + minutes
    for first, last, hazard in zip(AGES_MIN, (*AGES_MIN[1:], end), hazards, strict=True):
        total += hazard * max(0.0, min(end, last) - max(age_min, first)) / TICK_MIN
    return total


def lifetime_min(hazards: Sequence[float], age_min: float) -> float:
    """Return the expected minutes until the next event at an age."""
    life = TICK_MIN / hazards[-1]
    for place in range(len(AGES_MIN) - 2, age_class(age_min) - 1, -1):
        ticks = (AGES_MIN[place + 1] - max(age_min, AGES_MIN[place])) / TICK_MIN
        survives = (1 - hazards[place]) ** ticks
        life = (1 - survives) * TICK_MIN / hazards[place] + survives * life
    return life


def scaled(hazards: Sequence[float], factor: float) -> tuple[float, ...]:
    """Return the hazards of a market with this frailty."""
    return tuple(min(0.9, hazard * factor) for hazard in hazards)


def rounded_factor(factor: float) -> int:
    """Return a frailty in steps of `FACTOR_STEP`, so that jobs share plans."""
    return max(-MAX_FACTOR_STEPS, min(MAX_FACTOR_STEPS, round(log(factor) / log(FACTOR_STEP))))


def market_history(timeline: Timeline, now_min: float) -> MarketHistory:
    """Return the history of a market that was observed from its timeline's first time until now."""
    history = _until_last_change(timeline)
    return history.after(max(0.0, now_min - timeline[-1][0]), is_up=history.is_up)


@lru_cache(maxsize=4096)
def _until_last_change(timeline: Timeline) -> MarketHistory:
    (begin, is_up), *changes = timeline
    history = MarketHistory(is_up=is_up)
    for at_min, is_up in changes:
        history, begin = history.after(at_min - begin, is_up=is_up), at_min
    return history


@lru_cache(maxsize=1024)
def union(timelines: tuple[Timeline, ...]) -> Timeline:
    """Return the timeline of a market that is up while any of several markets is up, and down while all are down."""
    if len(timelines) == 1:
        return timelines[0]
    states, changes = list[bool | None]([None] * len(timelines)), list[tuple[float, bool | None]]()
    for at_min, number, is_up in merge(*([(at, n, up) for at, up in line] for n, line in enumerate(timelines))):
        states[number] = is_up
        if changes and changes[-1][0] == at_min:
            changes.pop()
        state = any(states) or (None if None in states else False)
        if not changes or changes[-1][1] is not state:
            changes.append((at_min, state))
    return tuple(changes)
