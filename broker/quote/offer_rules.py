"""Rules that drop an offer of an allowed kind of machine, and the message of each drop."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import ceil, inf

from broker.domain.money import format_usd
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
    drops: list[DropReason | None]
    """Drop reason of each offer of the market."""
    micros: list[int]
    """Micro-dollars to finish for each offer of the market; -1: not computed, or the job never finishes on the offer.
    """


def dollars(micros: int) -> Decimal:
    return Decimal(micros).scaleb(-6)


def total_usd(offer: Offer, kind: MachineCost, nodes: int, rate: float, seconds: float) -> Decimal:
    """Return the cost of a run of `seconds`, rounded up to the micro-dollar as in the column `micros`."""
    price = float(offer.usd_per_hour) * nodes
    return dollars(ceil(1e6 * ((price + kind.bucket.total) * kind.billed(seconds) + kind.traffic(rate))))


def _late_s(ask: QuoteRequest, offer: Offer, kind: MachineCost) -> float:
    """Return seconds by which the job misses the deadline, or P50 exceeds the rest of `max_duration`.

    A spot offer whose own duration misses the deadline is not late while on-demand can still replace it in time.
    """
    finish_s = ask.finish_s(offer, kind)
    if offer.spot and ask.fallback_s < inf:
        finish_s = min(finish_s, ask.fallback_finish_s(offer, kind))
    return max(finish_s - ask.deadline_s, kind.p50(ask.rate(offer)) - ask.duration_s) + kind.drained_s


def apply_rules(case: GroupCase) -> None:
    """Write the drop reason of each offer of a group, and the costs of those that can finish.

    The first rule that applies drops an offer. All rules are in one loop over the columns, because one pass for each
    rule takes a fifth longer. Every quote checks tens of thousands of offers.
    """
    ask, kind, group, offers, drops, micros = case.ask, case.kind, case.group, case.offers, case.drops, case.micros
    nodes, limit, cap, is_timed, excluded = ask.nodes, ask.limit, ask.cap_micros, ask.has_time_limit, ask.excluded
    has_place_rules = bool(ask.regions) or _has_small_host(group, kind)
    is_own, bucket_usd, (hours, traffic) = kind.caps.trust == "own", kind.bucket_usd, kind.undisturbed
    now_s = ask.now.timestamp()
    columns = zip(group.numbers, group.prices, group.rates, group.ends, group.gone, strict=True)
    for number, machine_price, rate, ends, is_gone in columns:
        price = machine_price * nodes
        if has_place_rules and (drop := _place_drop(ask, offers[number], kind)) is not None:
            drops[number] = drop
        # Zero means unknown in several catalogues, but an own machine may be free.
        elif price <= 0 and (price < 0 or not is_own):
            drops[number] = DropReason.PRICE
        elif price > limit:
            drops[number] = DropReason.HOURLY_LIMIT
        elif (usd := kind.usd(price, rate * nodes) if rate else (price + bucket_usd) * hours + traffic) == inf:
            drops[number] = DropReason.PREEMPTED_TOO_OFTEN
        elif ends < inf and ends - now_s < ask.occupied_s(offers[number], kind):
            drops[number] = DropReason.CONTRACT
        else:
            micros[number] = cost = ceil(usd * 1e6)
            if is_timed and _late_s(ask, offers[number], kind) > 0:
                drops[number] = DropReason.DEADLINE
            elif cost > cap:
                drops[number] = DropReason.CAP
            elif is_gone:
                drops[number] = DropReason.UNAVAILABLE
            elif excluded and ask.excluded_by(offers[number]) is not None:
                drops[number] = DropReason.EXCLUDED


def _has_small_host(group: OfferGroup, kind: MachineCost) -> bool:
    host = kind.host
    return group.cores < host.cores or group.ram < host.ram or group.disk < host.disk


def _place_drop(ask: QuoteRequest, offer: Offer, kind: MachineCost) -> DropReason | None:
    """Return why the region or the host of an offer drops it."""
    host = kind.host
    if ask.regions and offer.region not in ask.regions:
        return DropReason.REGION
    if offer.vcpus < host.cores or offer.ram_bytes < host.ram or offer.disk_bytes < host.disk:
        return DropReason.HOST
    return None


def busy_message(offer: Offer) -> str:
    """Return which job occupies an own machine; empty: it is free, or the job is not known."""
    return f"busy with job {offer.busy_with}" if offer.busy_with and offer.available is False else ""


def _price_message(ask: QuoteRequest, offer: Offer, kind: MachineCost) -> str:
    if offer.spot and offer.usd_per_hour > 0:
        return f"spot price {format_usd(offer.usd_per_hour)}/h is above on-demand"
    return f"price {format_usd(offer.usd_per_hour)}/h is impossible: the catalogue lacks the price"


def _limit_message(ask: QuoteRequest, offer: Offer, kind: MachineCost) -> str:
    limit = ask.spec.resources.max_usd_per_hour
    return f"{format_usd(offer.usd_per_hour * ask.nodes)}/h is above max_usd_per_hour {limit}"


def _preemptions_message(ask: QuoteRequest, offer: Offer, kind: MachineCost) -> str:
    rate = ask.rate(offer)
    return f"preempted every {1 / rate / 60:.0f} min, and each time costs {kind.lost(rate) / 60:.0f} min"


def _deadline_message(ask: QuoteRequest, offer: Offer, kind: MachineCost) -> str:
    seconds = (kind.p50(ask.rate(offer)), ask.p90(offer, kind), _late_s(ask, offer, kind))
    p50, p90, late_h = (s / 3600 for s in seconds)
    return f"takes {p50:.2f} h (P50), {p90:.2f} h (P90): {late_h:.2f} h too long for the deadline or max_duration"


def _contract_message(ask: QuoteRequest, offer: Offer, kind: MachineCost) -> str:
    assert offer.ends_at is not None  # otherwise no contract drops the offer
    left_s = max(0.0, (offer.ends_at - ask.now).total_seconds())
    need_s = ask.occupied_s(offer, kind)
    return (
        f"the host's contract ends in {left_s / 3600:.2f} h; "
        f"the job and a changeover take up to {need_s / 3600:.2f} h (P90)"
    )


def _cap_message(ask: QuoteRequest, offer: Offer, kind: MachineCost) -> str:
    rate = ask.rate(offer)
    usd = total_usd(offer, kind, ask.nodes, rate, kind.p50(rate))
    return f"expected {format_usd(usd)} to finish; {format_usd(ask.cap_left)} of the cap is left"


_MESSAGES: Mapping[DropReason, Callable[[QuoteRequest, Offer, MachineCost], str]] = {
    DropReason.REGION: lambda ask, offer, kind: f"region {offer.region}; asked for {', '.join(sorted(ask.regions))}",
    DropReason.HOST: lambda ask, offer, kind: shortage_message(offer, kind.host),
    DropReason.PRICE: _price_message,
    DropReason.HOURLY_LIMIT: _limit_message,
    DropReason.PREEMPTED_TOO_OFTEN: _preemptions_message,
    DropReason.CONTRACT: _contract_message,
    DropReason.DEADLINE: _deadline_message,
    DropReason.CAP: _cap_message,
    DropReason.UNAVAILABLE: lambda ask, offer, kind: busy_message(offer) or "the cloud has none now",
    DropReason.EXCLUDED: lambda ask, offer, kind: ask.excluded[ask.excluded_by(offer) or offer.id],
}
"""Message of each reason that `apply_rules` writes."""


def drop_message(ask: QuoteRequest, offer: Offer, kind: MachineCost, drop: DropReason) -> str:
    """Return why an offer was dropped: by a rule for offers, or because its kind of machine is excluded."""
    message = _MESSAGES.get(drop)
    return kind.reason if message is None or kind.drop is not None else message(ask, offer, kind)
