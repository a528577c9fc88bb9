"""Charges that more than one controller writes."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from broker.billing.accrual import traffic_owed, uncharged_usd
from broker.billing.prices import latest_price, price_changes
from broker.controllers.base.context import ControllerContext
from broker.controllers.observation.inventory import Inventory
from broker.domain.job import Attempt, PriceChange
from broker.domain.money import ZERO
from broker.ports import Charge


def up_to(attempt: Attempt, until: datetime, prices: Sequence[PriceChange] = ()) -> Charge:
    """All that is owed until then. `prices`: what is only known now of them."""
    known = replace(attempt, prices=(*attempt.prices, *prices))
    return Charge(
        attempt_id=attempt.id,
        job_id=attempt.job_id,
        since=attempt.charged_to,
        to=max(until, attempt.charged_to or until),
        usd=uncharged_usd(known, until),
        traffic_usd=traffic_owed(attempt, until),
        prices=tuple(prices),
    )


def moved_prices(context: ControllerContext, inventory: Inventory, attempt: Attempt) -> Sequence[PriceChange]:
    """As `price_changes`, by a listing that is young enough, and all that was listed of its machines before."""
    age_s = context.rhythm.billing_s
    seen, stood = inventory.fresh(attempt, max_age_s=age_s), inventory.stood(attempt, max_age_s=age_s)
    return price_changes(attempt, seen, context.clock.now(), stood)


def surplus(context: ControllerContext, inventory: Inventory, attempt: Attempt) -> Charge | None:
    """That more machines stand under its name than were bought, before they are destroyed and nothing shows them any
    more; None: there are none, or it is known, or no listing is young enough: another broker may have seen them go. It
    covers no time: the next charge makes up for it.
    """
    prices = moved_prices(context, inventory, attempt)
    more = max((price.extra_machines for price in prices), default=0) > latest_price(attempt).extra_machines
    return priced(attempt, prices) if more else None


def priced(attempt: Attempt, prices: Sequence[PriceChange]) -> Charge:
    """That the price has moved, and no time."""
    to = attempt.charged_to or attempt.create_sent_at or prices[0].since
    return Charge(
        attempt_id=attempt.id, job_id=attempt.job_id, since=attempt.charged_to, to=to, usd=ZERO, prices=prices
    )  # fmt: skip
