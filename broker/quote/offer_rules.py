"""Rules that drop an offer of an allowed kind of machine: each one decides, and explains its decision.

Predicates read whole columns, because every quote checks tens of thousands of offers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import ceil, inf

from broker.domain.money import show
from broker.domain.offer import DropReason, Offer
from broker.quote.machine_cost import MachineCost, shortage_message
from broker.quote.offer_index import OfferGroup
from broker.quote.request import QuoteRequest


@dataclass(kw_only=True, slots=True, eq=False)
class GroupCase:
    """Offers of one kind of machine, with the columns that the rules fill."""

    ask: QuoteRequest
    offers: Sequence[Offer]
    """All offers of the market."""
    group: OfferGroup
    kind: MachineCost
    micros: list[int]
    """Micro-dollars to finish for each offer of the market; -1: the job never finishes there, or was not computed."""


Positions = Sequence[int]
"""Positions in the columns of a group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferRule:
    """One reason to drop an offer."""

    drop: DropReason
    select: Callable[[GroupCase, Positions], list[int]]
    """Returns the positions of the offers to drop."""
    message: Callable[[QuoteRequest, Offer, MachineCost], str]
    """Explains the drop of one offer."""


def dollars(micros: int) -> Decimal:
    return Decimal(micros).scaleb(-6)


def total_usd(offer: Offer, kind: MachineCost, nodes: int, rate: float, seconds: float) -> Decimal:
    """Return the cost of a run of `seconds`, rounded up to the micro-dollar as in the column `micros`."""
    price = float(offer.usd_per_hour) * nodes
    return dollars(ceil(1e6 * ((price + kind.bucket.total) * kind.billed(seconds) + kind.traffic(rate))))


def _late_s(ask: QuoteRequest, offer: Offer, kind: MachineCost) -> float:
    """Return seconds by which P90 misses the deadline, or P50 exceeds the rest of `max_duration`."""
    rate, drained_s = ask.rate(offer), kind.teardown + 2 * kind.caps.list_lag_s + kind.quantum
    return max(ask.p90(offer, kind) - ask.deadline_s, kind.p50(rate) - ask.duration_s) + drained_s


def _in_other_region(case: GroupCase, positions: Positions) -> list[int]:
    regions, numbers, offers = case.ask.regions, case.group.numbers, case.offers
    return [at for at in positions if offers[numbers[at]].region not in regions] if regions else []


def _on_small_host(case: GroupCase, positions: Positions) -> list[int]:
    host, group, offers = case.kind.host, case.group, case.offers
    if group.cores >= host.cores and group.ram >= host.ram and group.disk >= host.disk:
        return []
    return [at for at in positions if _is_small(offers[group.numbers[at]], case.kind)]


def _is_small(offer: Offer, kind: MachineCost) -> bool:
    host = kind.host
    return offer.vcpus < host.cores or offer.ram_bytes < host.ram or offer.disk_bytes < host.disk


def _at_impossible_price(case: GroupCase, positions: Positions) -> list[int]:
    """Select negative and zero prices: zero means unknown in several catalogues, but an own machine may be free."""
    prices, is_own = case.group.prices, case.kind.caps.trust == "own"
    return [at for at in positions if prices[at] <= 0 and (prices[at] < 0 or not is_own)]


def _above_hourly_limit(case: GroupCase, positions: Positions) -> list[int]:
    prices, nodes, limit = case.group.prices, case.ask.nodes, case.ask.limit
    return [at for at in positions if prices[at] * nodes > limit] if limit < inf else []


def _never_finished(case: GroupCase, positions: Positions) -> list[int]:
    """Fill the column of costs, and select offers whose preemptions leave no time for work."""
    group, kind, nodes, micros = case.group, case.kind, case.ask.nodes, case.micros
    numbers, prices, rates, bucket_usd = group.numbers, group.prices, group.rates, kind.bucket.total
    (hours, traffic), endless = kind.undisturbed, []
    for at in positions:
        price, rate = prices[at] * nodes, rates[at]
        usd = kind.usd(price, rate * nodes) if rate else (price + bucket_usd) * hours + traffic
        if usd == inf:
            endless.append(at)
        else:
            micros[numbers[at]] = ceil(usd * 1e6)
    return endless


def _too_late(case: GroupCase, positions: Positions) -> list[int]:
    ask, numbers, offers = case.ask, case.group.numbers, case.offers
    return [at for at in positions if _late_s(ask, offers[numbers[at]], case.kind) > 0] if ask.has_time_limit else []


def _above_cap(case: GroupCase, positions: Positions) -> list[int]:
    numbers, micros, cap = case.group.numbers, case.micros, case.ask.cap_micros
    return [at for at in positions if micros[numbers[at]] > cap]


def _unavailable(case: GroupCase, positions: Positions) -> list[int]:
    gone = case.group.gone
    return [at for at in positions if gone[at]]


def _excluded(case: GroupCase, positions: Positions) -> list[int]:
    ask, numbers, offers = case.ask, case.group.numbers, case.offers
    return [at for at in positions if ask.excluded_by(offers[numbers[at]]) is not None] if ask.excluded else []


def _price_message(ask: QuoteRequest, offer: Offer, kind: MachineCost) -> str:
    if offer.spot and offer.usd_per_hour > 0:
        return f"spot price {show(offer.usd_per_hour)}/h is above on-demand"
    return f"price {show(offer.usd_per_hour)}/h is impossible: the catalogue lacks the price"


def _limit_message(ask: QuoteRequest, offer: Offer, kind: MachineCost) -> str:
    limit = ask.spec.resources.max_usd_per_hour
    return f"{show(offer.usd_per_hour * ask.nodes)}/h is above max_usd_per_hour {limit}"


def _preemptions_message(ask: QuoteRequest, offer: Offer, kind: MachineCost) -> str:
    rate = ask.rate(offer)
    return f"preempted every {1 / rate / 60:.0f} min, and each time costs {kind.lost(rate) / 60:.0f} min"


def _deadline_message(ask: QuoteRequest, offer: Offer, kind: MachineCost) -> str:
    seconds = (kind.p50(ask.rate(offer)), ask.p90(offer, kind), _late_s(ask, offer, kind))
    p50, p90, late = (s / 3600 for s in seconds)
    return f"takes {p50:.2f} h (P50), {p90:.2f} h (P90): {late:.2f} h too long for the deadline or max_duration"


def _cap_message(ask: QuoteRequest, offer: Offer, kind: MachineCost) -> str:
    rate = ask.rate(offer)
    usd = total_usd(offer, kind, ask.nodes, rate, kind.p50(rate))
    return f"expected {show(usd)} to finish; {show(ask.cap_left)} of the cap is left"


OFFER_RULES: Sequence[OfferRule] = (
    OfferRule(
        drop=DropReason.REGION,
        select=_in_other_region,
        message=lambda ask, offer, kind: f"region {offer.region}; asked for {', '.join(sorted(ask.regions))}",
    ),
    OfferRule(
        drop=DropReason.HOST,
        select=_on_small_host,
        message=lambda ask, offer, kind: shortage_message(offer, kind.host),
    ),
    OfferRule(drop=DropReason.PRICE, select=_at_impossible_price, message=_price_message),
    OfferRule(drop=DropReason.HOURLY_LIMIT, select=_above_hourly_limit, message=_limit_message),
    OfferRule(drop=DropReason.PREEMPTED_TOO_OFTEN, select=_never_finished, message=_preemptions_message),
    OfferRule(drop=DropReason.DEADLINE, select=_too_late, message=_deadline_message),
    OfferRule(drop=DropReason.CAP, select=_above_cap, message=_cap_message),
    OfferRule(
        drop=DropReason.UNAVAILABLE, select=_unavailable, message=lambda ask, offer, kind: "the cloud has none now"
    ),
    OfferRule(
        drop=DropReason.EXCLUDED,
        select=_excluded,
        message=lambda ask, offer, kind: ask.excluded[ask.excluded_by(offer) or offer.id],
    ),
)
"""The first rule that selects an offer drops it. Costs are known from PREEMPTED_TOO_OFTEN on."""
_RULE_OF = {rule.drop: rule for rule in OFFER_RULES}


def apply_rules(case: GroupCase, drops: list[DropReason | None]) -> None:
    """Write the drop reason of each offer of a group, and the costs of those that can finish."""
    numbers = case.group.numbers
    positions: Positions = range(len(numbers))
    for rule in OFFER_RULES:
        dropped = rule.select(case, positions)
        if dropped:
            for at in dropped:
                drops[numbers[at]] = rule.drop
            selected = set(dropped)
            positions = [at for at in positions if at not in selected]


def drop_message(ask: QuoteRequest, offer: Offer, kind: MachineCost, drop: DropReason) -> str:
    """Return why an offer was dropped: by a rule for offers, or because its kind of machine is excluded."""
    rule = _RULE_OF.get(drop)
    return kind.reason if rule is None or kind.drop is not None else rule.message(ask, offer, kind)
