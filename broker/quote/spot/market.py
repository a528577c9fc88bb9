"""Describes the market of a quote to the spot policy, and returns its outlook in dollars.

The reference of times and prices is the work of the fastest on-demand offer that is kept. A spot machine of another
speed is compared by its price for the same work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from heapq import nsmallest
from math import inf
from typing import Literal

from broker.domain.offer import DropReason, Offer, SpotOutlook
from broker.estimator.spot_hazards import market
from broker.quote.machine_cost import MachineCost
from broker.quote.offer_index import OfferIndex
from broker.quote.request import QuoteRequest
from broker.quote.spot.plan import SpotAction
from broker.quote.spot.policy import SpotOption, SpotSituation, outlook

OPTIONS = 16
"""Number of spot markets that are considered: half of them the cheapest ones for sale, the rest the cheapest others."""
MIN_PRICE = 0.01
"""Lowest price of spot divided by that of on-demand, for free machines."""
_SOLD_OUT = frozenset({DropReason.UNAVAILABLE, DropReason.EXCLUDED})
_ACTIONS: Mapping[SpotAction, Literal["wait", "on-demand", "spot"]] = {
    SpotAction.WAIT: "wait",
    SpotAction.DEMAND: "on-demand",
    SpotAction.SPOT: "spot",
}


@dataclass(frozen=True, kw_only=True)
class AssessedMarket:
    """The offers of a market with the columns that the rules filled."""

    ask: QuoteRequest
    sold: OfferIndex
    kinds: Sequence[MachineCost]
    drops: Sequence[DropReason | None]
    micros: Sequence[int]
    """Micro-dollars to finish by offer; -1: never."""

    def kind(self, number: int) -> MachineCost:
        return self.kinds[self.sold.which[number]]


@dataclass(frozen=True, kw_only=True)
class _ReferenceWork:
    """Work of the fastest on-demand offer, by which times and prices are compared."""

    kind: MachineCost
    usd_per_hour: float
    """Dollars of an hour of this work on the cheapest on-demand offer."""


def spot_outlook(assessed: AssessedMarket, *, on_demand: bool) -> tuple[SpotOutlook, int, int] | None:
    """Return the outlook with the numbers of its spot and on-demand offers; None: there is nothing to decide.

    `on_demand`: the job runs on demand now.
    """
    ask, offers = assessed.ask, assessed.sold.offers
    if ask.accepts_risk or ask.fallback_s == inf or ask.spec.resources.objective != "cheapest":
        return None
    demand_numbers, spots = _kept_on_demand(assessed), _spot_numbers(assessed)
    if not demand_numbers or not spots:
        return None
    demand = min(demand_numbers, key=assessed.micros.__getitem__)
    kind = min((assessed.kind(number) for number in demand_numbers), key=lambda kind: kind.work)
    if kind.work <= 0:  # no step and no evaluation is left
        return None
    reference = _ReferenceWork(kind=kind, usd_per_hour=_usd_per_hour(assessed, demand, kind))
    if reference.usd_per_hour <= 0:  # a free machine of one's own: nothing is cheaper
        return None
    case = _situation(assessed, spots, reference, on_demand=on_demand)
    expected = outlook(case) if case.slack_min >= 0 else None
    if expected is None:
        return None
    # Costs of the plan are of the P90 of the work, those of a quote of the P50.
    usd_per_hour = reference.usd_per_hour * reference.kind.p50(0.0) / ask.fallback_s
    result = SpotOutlook(
        action=_ACTIONS[expected.action],
        wait_usd=_dollars(expected.wait * usd_per_hour),
        demand_usd=_dollars(expected.demand * usd_per_hour),
        spot_usd=_dollars(expected.spot * usd_per_hour),
        offer_id=expected.offer_id,
        until=ask.now + timedelta(minutes=max(0.0, case.slack_min - case.changeover_min)),
    )
    return result, next(number for number in spots if offers[number].id == expected.offer_id), demand


def _situation(
    assessed: AssessedMarket, spots: Sequence[int], reference: _ReferenceWork, *, on_demand: bool
) -> SpotSituation:
    ask, offers = assessed.ask, assessed.sold.offers
    kind = assessed.kind(spots[0])
    time_s, changeover_s = ask.deadline_s - kind.drained_s, ask.changeover_s(offers[spots[0]], kind)
    work_s = max(reference.kind.work, ask.fallback_s - changeover_s)
    return SpotSituation(
        time_min=time_s / 60,
        slack_min=(time_s - work_s) / 60,
        changeover_min=changeover_s / 60,
        options=[
            SpotOption(
                offer_id=offers[number].id,
                market=market(offers[number], ask.nodes),
                price=max(MIN_PRICE, _usd_per_hour(assessed, number, reference.kind) / reference.usd_per_hour),
                is_for_sale=assessed.drops[number] is None,
            )
            for number in spots
        ],
        timelines=ask.learned.markets,
        now_min=ask.now.timestamp() / 60,
        on_demand=on_demand,
        plans=ask.plans,
    )


def _kept_on_demand(assessed: AssessedMarket) -> list[int]:
    """Return the number of the cheapest kept on-demand offer of each kind."""
    numbers = (
        min(
            (number for number in machines.numbers if assessed.drops[number] is None),
            key=assessed.micros.__getitem__,
            default=None,
        )
        for machines in assessed.sold.machines
        if not machines.like.spot
    )
    return [number for number in numbers if number is not None]


def _spot_numbers(assessed: AssessedMarket) -> list[int]:
    """Return the cheapest offer of each spot market, for sale where one is, at most `OPTIONS`.

    Cheap markets that are sold out must not displace all that are for sale.
    """
    ask, offers, best = assessed.ask, assessed.sold.offers, dict[object, tuple[bool, int, int]]()
    for machines in assessed.sold.machines:
        if not machines.like.spot:
            continue
        for number in machines.numbers:
            drop = assessed.drops[number]
            if drop is not None and (drop not in _SOLD_OUT or not _may_return(ask, offers[number])):
                continue
            key, entry = market(offers[number], ask.nodes), (drop is not None, assessed.micros[number], number)
            if key not in best or entry < best[key]:
                best[key] = entry
    for_sale = nsmallest(OPTIONS // 2, (entry for entry in best.values() if not entry[0]))
    others = set(best.values()).difference(for_sale)
    selected = for_sale + nsmallest(OPTIONS - len(for_sale), others, key=lambda entry: entry[1:])
    return [number for _, _, number in sorted(selected, key=lambda entry: entry[1:])]


def _may_return(ask: QuoteRequest, offer: Offer) -> bool:
    """Return True for an offer that is unavailable, or excluded by its own id.

    Offers that are excluded with their host or account do not count, because waiting may not end such an exclusion.
    """
    return offer.available is False or offer.id in ask.excluded


def _usd_per_hour(assessed: AssessedMarket, number: int, reference: MachineCost) -> float:
    """Return the price of the work that the reference does in an hour."""
    offer, kind = assessed.sold.offers[number], assessed.kind(number)
    return (float(offer.usd_per_hour) * assessed.ask.nodes + kind.bucket_usd) * kind.work / reference.work


def _dollars(usd: float) -> Decimal | None:
    return None if usd == inf else Decimal(round(1e6 * usd)).scaleb(-6)
