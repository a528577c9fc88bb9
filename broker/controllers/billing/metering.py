"""Billing: charges every live attempt by its billing quantum and for its traffic, and signals the cap and time limits.

Steps: read the live attempts; for each, gather prices and listings, compute what is owed, write all charges at once.
Facts: listed prices, extra machines, the end of listings, the time without any broker. Decisions: a charge, a signal.
"""

import logging
from collections.abc import Sequence, Set
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from typing import Protocol

from broker.billing.accrual import billed_until, traffic_owed, uncharged_usd
from broker.billing.time_limits import out_of_time_message
from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import event
from broker.controllers.billing.charges import moved_prices, self_stopped_by
from broker.controllers.observation.inventory import Inventory
from broker.domain.ids import AttemptId
from broker.domain.instance import Caps
from broker.domain.job import Attempt, Event, Signal
from broker.domain.money import ZERO, show
from broker.lifecycle.signals import due_signal
from broker.ports import Charge, Leased

log = logging.getLogger(__name__)

LISTED_S = 60.0
"""Seconds for which a process that starts, or was frozen, waits for two listings of a cloud. Then caps are enforced."""
PROOF_S = 15.0
"""Seconds that a proof of absence takes in addition to the lag of listings."""


class MeteringCache(Protocol):
    """Per-process cache about attempts. Evicting a live attempt is safe: the next decision only takes longer."""

    def keep(self, live: Set[AttemptId]) -> None:
        """Evict all other attempts."""
        ...


class Billing:
    """Reads without a lease and writes under the fence of `charged_to`, so no time is charged twice."""

    name = "billing"

    def __init__(self, context: ControllerContext, inventory: Inventory, caches: Sequence[MeteringCache] = ()) -> None:
        """`caches`: evict attempts that are not live, since any broker may have ended them."""
        self._context = context
        self._inventory = inventory
        self._caches = caches
        self.every_s = context.intervals.billing_s
        self._began = context.clock.monotonic()
        self._stepped: datetime | None = None

    async def step(self) -> bool:
        self._thaw()
        live = await self._context.store.live_attempts()
        for cache in self._caches:
            cache.keep({row.attempt.id for row in live})
        # A cloud that is configured at another broker only is charged by that broker.
        known_here = [row for row in live if row.attempt.line.offer.provider in self._context.providers]
        charges = [charge for charge in map(self._charge_or_log, known_here) if charge is not None]
        if charges:
            await self._context.store.charge(charges)
        return False

    def _charge_or_log(self, row: Leased) -> Charge | None:
        """Return None, and log, when an attempt cannot be charged, so that the caps of others are still enforced."""
        try:
            return self._charge(row)
        except Exception:
            log.exception("billing: attempt %s of job %s cannot be charged", row.attempt.id, row.job.id)
            return None

    def _charge(self, row: Leased) -> Charge | None:
        """Return what is owed since the last charge, with a signal if the attempt must end; None: nothing is new."""
        attempt, job, context = row.attempt, row.job, self._context
        if attempt.create_sent_at is None:
            return None
        now, caps = context.clock.now(), context.provider_of(attempt).caps
        if self._is_blind(attempt.line.offer.provider):
            return None
        prices = moved_prices(context, self._inventory, attempt)
        known = replace(attempt, prices=(*attempt.prices, *prices)) if prices else attempt
        until = self._until(row, known, now, caps)
        due, traffic = uncharged_usd(known, until), traffic_owed(known, now)
        signal = due_signal(known, job, caps, self._stood_until(row, now), context.drain_budget)
        if due == traffic == ZERO and signal is None and not prices:
            return None
        return Charge(
            attempt_id=attempt.id,
            job_id=job.id,
            since=attempt.charged_to,
            to=max(until, attempt.charged_to or until),
            usd=due,
            traffic_usd=traffic,
            prices=prices,
            signal=signal,
            event=_signal_event(row, signal, job.spent_usd + due + traffic, now),
        )

    def _thaw(self) -> None:
        """Start again as a new process after a long pause, in which the monotonic clock may have stopped."""
        now = self._context.clock.now()
        if self._stepped and (now - self._stepped).total_seconds() > self.every_s + LISTED_S:
            self._began = self._context.clock.monotonic()
        self._stepped = now

    def _is_blind(self, provider: str) -> bool:
        """Return True if this process has not listed a cloud twice since its start.

        A machine that vanished while no broker ran would otherwise be charged until now.
        """
        is_new = self._context.clock.monotonic() - self._began < LISTED_S
        return is_new and not self._inventory.has_listed_twice(provider, self._began)

    def _stood_until(self, row: Leased, now: datetime) -> datetime:
        """Return the latest possible end of a machine that two listings omit and that may have run without a broker.

        Return `now` for all others.
        """
        attempt, booted_at = row.attempt, row.attempt.booted_at
        provider = attempt.line.offer.provider
        if booted_at is None or self._inventory.missing_twice_at(provider, attempt.name, born_by=booted_at) is None:
            return now
        return min(now, self_stopped_by(self._context, self._inventory, attempt, row.job) or now)

    def _until(self, row: Leased, attempt: Attempt, now: datetime, caps: Caps) -> datetime:
        """Return the time up to which an attempt is charged now.

        Charges are final. So a machine that listings omit is not charged further before its absence is proven; if it
        exists after all, the next charge includes the time between. A machine that vanished while no broker ran is
        charged only when its attempt ends, because its possible lifetime counts from the previous charge.
        """
        provider, born_by = attempt.line.offer.provider, attempt.booted_at
        is_listed, stood_until = self._inventory.is_listed(provider, attempt.name), self._stood_until(row, now)
        if stood_until < now:
            return attempt.charged_to or attempt.create_sent_at or now
        until = billed_until(attempt, now, caps.list_lag_s + PROOF_S, shown=is_listed)
        if born_by is None:  # it may not be listed yet; from here on its listing is recorded
            unseen = self._inventory.latest_possible_end(attempt)
        else:
            unseen = self._inventory.missing_twice_at(provider, attempt.name, born_by=born_by)
        return min(until, unseen or until)


def _signal_event(row: Leased, signal: Signal | None, spent: Decimal, now: datetime) -> Event | None:
    if signal is None:
        return None
    if signal is Signal.CAP:
        message = f"{show(spent)} of {show(row.job.cap_usd)} spent: checkpoint and stop"
        return event(row.job, "job.cap_near", message, attempt=row.attempt)
    return event(row.job, "job.out_of_time", out_of_time_message(row.job, now), attempt=row.attempt)
