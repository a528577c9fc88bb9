"""Charges that several controllers write, and the end of machines that ran without a broker."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from broker.billing.accrual import traffic_owed, uncharged_usd
from broker.billing.prices import latest_price, price_changes
from broker.controllers.base.context import ControllerContext
from broker.controllers.observation.inventory import Inventory
from broker.domain.instance import SELF_STOP_S
from broker.domain.job import Attempt, Job, PriceChange
from broker.domain.money import ZERO
from broker.ports import Charge


def up_to(attempt: Attempt, until: datetime, prices: Sequence[PriceChange] = ()) -> Charge:
    """Return the charge of everything owed up to `until`. `prices`: price changes that are not recorded yet."""
    priced = replace(attempt, prices=(*attempt.prices, *prices)) if prices else attempt
    return Charge(
        attempt_id=attempt.id,
        job_id=attempt.job_id,
        since=attempt.charged_to,
        to=max(until, attempt.charged_to or until),
        usd=uncharged_usd(priced, until),
        traffic_usd=traffic_owed(attempt, until),
        prices=tuple(prices),
    )


def moved_prices(context: ControllerContext, inventory: Inventory, attempt: Attempt) -> Sequence[PriceChange]:
    """Return the price changes that a recent listing and the history of its machines show: see `price_changes`."""
    age_s = context.intervals.billing_s
    machines, spans = (
        inventory.recently_listed(attempt, max_age_s=age_s),
        inventory.machine_spans(attempt, max_age_s=age_s),
    )
    return price_changes(attempt, machines, context.clock.now(), spans)


def surplus(context: ControllerContext, inventory: Inventory, attempt: Attempt) -> Charge | None:
    """Return the charge that records extra machines under an attempt's name, before they are destroyed.

    None: no extra machine exists, all are recorded already, or no listing is recent enough. The charge covers no time,
    because the next charge includes the cost of the extra machines.
    """
    prices = moved_prices(context, inventory, attempt)
    has_extra = max((price.extra_machines for price in prices), default=0) > latest_price(attempt).extra_machines
    return priced(attempt, prices) if has_extra else None


def priced(attempt: Attempt, prices: Sequence[PriceChange]) -> Charge:
    """Return a charge that records price changes and covers no time."""
    to = attempt.charged_to or attempt.create_sent_at or prices[0].since
    return Charge(
        attempt_id=attempt.id, job_id=attempt.job_id, since=attempt.charged_to, to=to, usd=ZERO, prices=prices
    )  # fmt: skip


def self_stopped_by(context: ControllerContext, inventory: Inventory, attempt: Attempt, job: Job) -> datetime | None:
    """Return the latest possible end of a machine that vanished while no broker was running; None: unbounded.

    An agent that has sent a heartbeat waits for the broker's lease to move, saves, and waits for the destroy. That time
    counts from the last charge, or from the last listing that showed the machine. A machine that was never charged
    counts from its create and the time for a boot, because its boot may have been recorded only later.
    """
    caps, limits = context.provider_of(attempt).caps, context.limits
    known_at = attempt.charged_to or attempt.create_sent_at
    if caps.self_stop == "none" or not limits.deadman_s or attempt.first_beat_at is None or known_at is None:
        return None
    known_at = min(known_at + timedelta(seconds=caps.boot_deadline_s), max(known_at, attempt.first_beat_at))
    # A billing round without a new quantum leaves `charged_to` as it is, and the lease may be renewed after that round.
    charged_s = attempt.line.offer.billing_quantum_s + context.intervals.billing_s + context.intervals.deadman_s
    alone_s = limits.deadman_s + limits.drain_s + SELF_STOP_S + job.spec.keep_on_failure
    return max(known_at, inventory.last_listed_at(attempt) or known_at) + timedelta(seconds=charged_s + alone_s)
