"""A quote as the form for a new job shows it: one sentence, memory, the best offers, and what was dropped. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

from broker.domain.offer import OfferVerdict, Quote, QuoteLine
from broker.quote.summary import LABELS

SHOWN = 5
SCANNED = 400
"""Kept lines among which the cheapest of the other market is looked for."""
Z90 = 1.2815515655446004
"""Ninetieth percentile of the standard normal distribution."""
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "context")


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """One category of memory, as a bar: place and width in percent of the card."""

    name: str
    bytes: int
    x: float
    width: float


@dataclass(frozen=True, kw_only=True)
class QuoteSummary:
    """The quote in the terms of its page."""

    best: QuoteLine | None
    lines: tuple[QuoteLine, ...]
    kept: int
    drops: tuple[tuple[str, int], ...]
    """(reason in words, number of offers), most offers first."""
    memory: tuple[MemoryPart, ...]
    required_percent: float
    """Needed share of the card, with the margin."""
    finish_p50: datetime | None
    finish_p90: datetime | None
    deadline_chance: float | None
    """Chance from 0 to 1 to end before the deadline; None: no deadline, or no speed."""
    spot_saves: Decimal | None
    """Expected dollars that the best spot offer costs less than the best one on demand; None: one market only."""
    proposed_cap: Decimal | None
    is_simulated: bool


def quote_summary(quote: Quote, now: datetime, deadline: datetime | None) -> QuoteSummary:
    best, kept_lines = quote.best, [line for line in quote.lines[:SCANNED] if line.verdict is OfferVerdict.KEPT]
    drops = sorted(((LABELS.get(reason, reason.value), count) for reason, count in quote.drops.items()), key=_by_count)
    return QuoteSummary(
        best=best,
        lines=tuple(kept_lines[:SHOWN]),
        kept=quote.kept_count,
        drops=tuple(drops),
        memory=() if best is None else memory_parts(best),
        required_percent=0.0 if best is None or best.memory is None else _percent(best, best.memory.required),
        finish_p50=_after(now, best.hours_p50 if best else None),
        finish_p90=_after(now, best.hours_p90 if best else None),
        deadline_chance=None if best is None or deadline is None else deadline_chance(best, now, deadline),
        spot_saves=_spot_saves(kept_lines),
        proposed_cap=quote.proposed_cap_usd,
        is_simulated=any(line.offer.simulated for line in kept_lines[:SHOWN]),
    )


def _by_count(pair: tuple[str, int]) -> int:
    return -pair[1]


def _after(now: datetime, hours: float | None) -> datetime | None:
    return None if hours is None else now + timedelta(hours=hours)


def _percent(line: QuoteLine, count: int) -> float:
    return min(100.0, 100 * count / max(1, line.offer.gpu_memory_bytes))


def memory_parts(line: QuoteLine) -> tuple[MemoryPart, ...]:
    """Return the categories of memory of a line, side by side in their order."""
    parts, x = [], 0.0
    for name in PARTS if line.memory is not None else ():
        count = int(getattr(line.memory, name))
        width = min(100 - x, _percent(line, count))
        parts.append(MemoryPart(name=name, bytes=count, x=round(x, 3), width=round(width, 3)))
        x += width
    return tuple(parts)


def deadline_chance(line: QuoteLine, now: datetime, deadline: datetime) -> float | None:
    """Return the chance that a line ends before the deadline.

    Hours are taken as log-normal through their P50 and P90; None: they are not known.
    """
    left = (deadline - now).total_seconds() / 3600
    if line.hours_p50 is None or line.hours_p90 is None:
        return None
    if left <= 0:
        return 0.0
    if line.hours_p90 <= line.hours_p50:
        return 1.0 if left >= line.hours_p50 else 0.0
    spread = math.log(line.hours_p90 / line.hours_p50) / Z90
    return 0.5 * (1 + math.erf(math.log(left / line.hours_p50) / spread / math.sqrt(2)))


def _spot_saves(kept_lines: Sequence[QuoteLine]) -> Decimal | None:
    prices = {
        spot: min(
            (line.usd_p50 for line in kept_lines if line.offer.spot is spot and line.usd_p50 is not None), default=None
        )
        for spot in (True, False)
    }
    spot, demand = prices[True], prices[False]
    return None if spot is None or demand is None or spot >= demand else demand - spot
