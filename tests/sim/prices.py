"""Market prices of spot machines while they run, and the range that an attempt's charges may have. Prices move at any
time, and brokers see them in listings."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise

from broker.domain.money import ZERO
from broker.domain.offer import Offer
from providers.simulated.market import rng
from tests.sim.faults import Fault

KIND = "cloud.price_moves"
STEP_S = (5.0, 60.0)
"""Range of seconds for which a price is constant."""
BARE = Decimal("0.9")
"""Listed share of a fixed price: the listing omits the disk, which is billed as well."""
CLOCK_S = 2.0
"""Seconds by which a charge's time may be off: a read of the database's clock takes up to a second; the write follows
the decision.
"""


@dataclass(frozen=True, kw_only=True)
class Charged:
    """Written charge up to `to`. `asked`: time of its broker's decision.

    `begun` and `price` are those of the broker's listing at that time, if it was young enough and showed the price of
    every machine. `partly`: the last such listing, if the broker's listing showed only some prices.
    """

    to: float
    asked: float
    begun: float | None = None
    price: Decimal = ZERO
    partly: float | None = None


@dataclass(frozen=True, kw_only=True)
class Span:
    """Dollars an hour that charges of one machine may reach in a span of time."""

    begins: float
    ends: float
    low: Decimal
    high: Decimal


class Prices:
    """Prices of all spot machines: the purchase price times a moving factor, at most the on-demand price."""

    def __init__(self, seed: int, plan: Sequence[Fault]) -> None:
        steps = [step for number, fault in enumerate(f for f in plan if f.kind == KIND)
                 for step in _steps(seed, number, fault)]  # fmt: skip
        self._steps = sorted(steps)
        self._times = [at for at, _ in self._steps]

    @property
    def moves(self) -> bool:
        return bool(self._steps)

    def at(self, offer: Offer, moment: float) -> Decimal:
        if not (offer.price_moves and self._steps):
            return offer.usd_per_hour
        place = bisect_right(self._times, moment)
        return _priced(offer, self._steps[place - 1][1] if place else Decimal(1))

    def _within(self, offer: Offer, since: float, until: float) -> list[Decimal]:
        """Return all values within a span."""
        first, last = bisect_right(self._times, since), bisect_right(self._times, until)
        return [self.at(offer, since), *(_priced(offer, factor) for _, factor in self._steps[first:last])]

    def spans(self, offer: Offer, charges: Sequence[Charged], sent: float, until: float) -> Iterator[Span]:
        """Yield the range of prices that may be charged, from the create on, without gaps.

        A broker uses the last listing behind a charge; another broker may have an older listing. Therefore every price
        since that listing may be charged, up to the charge. A rise counts back to the charge before, and a fall counts
        from its listing. One machine of several may show a rise while no later listing shows a fall. Without a listing
        that shows all machines, every price since the create may be charged.
        """
        slack, begins = CLOCK_S + offer.billing_quantum_s, sent
        for number, one in enumerate((*charges, Charged(to=until, asked=until))):
            ends = min(max(one.to, begins), until)
            earlier = [c for c in charges[:number] if c.asked <= begins + CLOCK_S]
            known = [c.begun for c in earlier if c.begun is not None]
            bought = [] if known else [offer.usd_per_hour]
            since = (min(known[-1], _stale(earlier)) if known else sent) - slack
            could = self._within(offer, since, max(ends, one.asked) + slack) + bought
            if ends > begins:
                yield Span(begins=begins, ends=ends, low=min(could), high=max(could))
            begins = ends

    def rises(self, offer: Offer, charges: Sequence[Charged], sent: float) -> Iterator[Span]:
        """Yield the least prices. A charge covers at least its own listing's price, since the charge before it.
        Exceptions are the seconds by which clocks may differ, and those before a fall was listed."""
        before, previous = sent, sent
        for charge in charges:
            if charge.begun is not None:
                begins, ends = max(before, previous) + CLOCK_S, charge.to - CLOCK_S
                if ends > begins:
                    yield Span(begins=begins, ends=ends, low=charge.price, high=charge.price)
                previous = charge.asked
            before = max(before, charge.to)


def _stale(charges: Sequence[Charged]) -> float:
    """Return the time since which the costs of only some machines are known, after the last charge that covers all."""
    last = max(place for place, charge in enumerate(charges) if charge.begun is not None)
    return min((charge.partly for charge in charges[last:] if charge.partly is not None), default=math.inf)


def _priced(offer: Offer, factor: Decimal) -> Decimal:
    return min(offer.usd_per_hour * factor, offer.on_demand_usd_per_hour or offer.usd_per_hour)


def _steps(seed: int, number: int, fault: Fault) -> Iterator[tuple[float, Decimal]]:
    """Yield (time, price) steps. `share`: largest relative change."""
    draw, at, ends = rng(seed, "price moves", number), fault.at, fault.at + fault.for_s
    while at < ends:
        factor = draw.uniform(1, 1 + fault.share)
        yield at, Decimal(str(round(factor if draw.random() < 0.5 else 1 / factor, 2)))
        at += draw.uniform(*STEP_S)
    yield ends, Decimal(1)


def least(stand: tuple[float, float], spans: Sequence[Span], rises: Sequence[Span]) -> Decimal:
    """Return dollars of one machine from its birth to its end."""
    total = ZERO
    for span in spans:
        total += span.low * _overlap(span, *stand)
        raised = (rise for rise in rises if rise.low > span.low)
        total += sum((  # rises do not overlap each other
            (rise.low - span.low) * _overlap(rise, max(stand[0], span.begins), min(stand[1], span.ends))
            for rise in raised
        ), ZERO)  # fmt: skip
    return total / 3600


def dearest(spans: Sequence[Span], quantum_s: int) -> Decimal:
    """Return dollars an hour times seconds; a quantum in which the price changed costs the highest of it."""
    changed = sum((abs(after.high - before.high) for before, after in pairwise(spans)), ZERO)
    return sum((span.high * _overlap(span, span.begins, span.ends) for span in spans), changed * quantum_s)


def _overlap(span: Span, since: float, until: float) -> Decimal:
    return Decimal(str(round(max(0.0, min(span.ends, until) - max(span.begins, since)), 3)))
