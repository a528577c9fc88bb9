"""Expected cost, end and chance of meeting the deadline, for the choice of placement and for on-demand only.

P10 assumes that duration and cost are log-normal, with the P50 and P90 of the quote.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from math import erf, log, sqrt

from broker.domain.offer import Prospect, Quote, QuoteLine
from broker.quote.machine_cost import Z90
from broker.quote.placement import choose
from broker.quote.spot.delay import wait_end

UNLIMITED_USD, MICRO = Decimal(10**9), Decimal("0.000001")


@dataclass(frozen=True, kw_only=True)
class Prospects:
    """The chosen policy next to on-demand only. None: nothing is bought, or its time is unknown."""

    chosen: Prospect | None
    on_demand: Prospect | None


def prospects(quote: Quote) -> Prospects:
    """Return the prospects of a job that is submitted now. The cap is not checked again."""
    choice = choose(quote, cap_left=UNLIMITED_USD, attempt_number=1, min_budget=lambda line: Decimal(0))
    line = quote.best_on_demand()
    on_demand = None if line is None else _prospect(quote, line, "buys on demand")
    if choice.line is not None:
        # The number of the attempt and the offers that were not chosen say nothing about the policy.
        purchase = _prospect(quote, choice.line, f"buys {'spot' if choice.line.offer.spot else 'on demand'}")
        return Prospects(chosen=_with_fallback(purchase, on_demand, quote), on_demand=on_demand)
    return Prospects(chosen=_waiting(quote, line, on_demand, choice.reason), on_demand=on_demand)


def _prospect(quote: Quote, line: QuoteLine, reason: str) -> Prospect | None:
    if line.usd_p50 is None or line.usd_p90 is None or line.hours_p50 is None or line.hours_p90 is None:
        return None
    return Prospect(
        action="buy",
        market="spot" if line.offer.spot else "on-demand",
        offer_id=line.offer.id,
        reason=reason,
        usd_p10=_p10(line.usd_p50, line.usd_p90),
        usd_p50=line.usd_p50,
        usd_p90=line.usd_p90,
        finish_p50=quote.made_at + timedelta(hours=line.hours_p50),
        finish_p90=quote.made_at + timedelta(hours=line.hours_p90),
        deadline_chance=_chance(quote.deadline, quote.made_at, line),
    )


def _waiting(quote: Quote, line: QuoteLine | None, on_demand: Prospect | None, reason: str) -> Prospect | None:
    """Return the prospect of a wait for spot, after which on-demand is bought at the latest."""
    outlook, spot = quote.spot_outlook, quote.sold_out_spot()
    planned = (outlook.offer_id, outlook.wait_usd, outlook.until) if outlook else None
    delayed = (spot.offer_id, spot.usd_p50, wait_end(quote, line, spot)) if spot and line else None
    offer_id, usd, until = planned or delayed or ("", None, None)
    if line is None or on_demand is None or on_demand.usd_p50 <= 0 or usd is None:
        return None
    later = None if until is None else until - quote.made_at
    return replace(
        on_demand,
        action="wait",
        market="spot",
        offer_id=offer_id,
        reason=reason,
        usd_p10=(usd * on_demand.usd_p10 / on_demand.usd_p50).quantize(MICRO),
        usd_p50=usd,
        finish_p50=_plus(on_demand.finish_p50, later),
        finish_p90=_plus(on_demand.finish_p90, later),
        deadline_chance=None if until is None else _chance(quote.deadline, until, line),
    )


def _plus(moment: datetime | None, later: timedelta | None) -> datetime | None:
    return None if moment is None or later is None else moment + later


def _with_fallback(purchase: Prospect | None, on_demand: Prospect | None, quote: Quote) -> Prospect | None:
    """Return the prospect with the chance that on-demand, bought at its latest start, still meets the deadline."""
    if purchase is None or purchase.market != "spot" or purchase.deadline_chance is None or on_demand is None:
        return purchase
    is_possible = quote.latest_on_demand_start is not None and quote.latest_on_demand_start >= quote.made_at
    return replace(purchase, deadline_chance=max(purchase.deadline_chance, 0.9 if is_possible else 0.0))


def _p10(p50: Decimal, p90: Decimal) -> Decimal:
    return (p50 * p50 / p90).quantize(MICRO) if p90 else p50


def _chance(deadline: datetime | None, start: datetime, line: QuoteLine) -> float | None:
    """Return the chance that a run on the line's offer, begun at `start`, ends by the deadline."""
    if deadline is None or line.hours_p50 is None or line.hours_p90 is None:
        return None
    left_h = (deadline - start).total_seconds() / 3600
    if left_h <= 0 or line.hours_p90 <= line.hours_p50:
        return float(left_h >= line.hours_p50)
    deviations = log(left_h / line.hours_p50) * Z90 / log(line.hours_p90 / line.hours_p50)
    return (1 + erf(deviations / sqrt(2))) / 2
