"""Billing: charges every live attempt by its billing quantum and for its traffic, and signals the cap and time limits.

Steps: read the live attempts whose create was sent; for each, gather `ChargeFacts` and call `decide_charge`; write all
charges at once.
Facts: listed prices, extra machines, the end of listings, the time without any broker.
Decisions: no charge, or a charge up to a time, with price changes and, if due, the signal CAP or OUT_OF_TIME.
"""

import logging
from collections.abc import Sequence, Set
from datetime import datetime
from typing import Protocol

from broker.controllers.base.context import ControllerContext
from broker.controllers.billing.charges import moved_prices, self_stopped_by
from broker.controllers.observation.inventory import Inventory
from broker.domain.ids import AttemptId
from broker.lifecycle.decisions.charge_decision import ChargeDecision, ChargeFacts, charge_event, decide_charge
from broker.ports import Charge, Leased

log = logging.getLogger(__name__)

LISTED_S = 60.0
"""Maximum seconds for which a new or thawed process waits for two listings of a cloud. Then it charges without them,
so that caps are enforced.
"""


class MeteringCache(Protocol):
    """Per-process cache about attempts. Evicting a live attempt is safe: the next decision only takes longer."""

    def keep(self, live: Set[AttemptId]) -> None:
        """Evict all other attempts."""
        ...


class Billing:
    """Reads without a lease and writes under the fence of `charged_to`, so no time is charged twice."""

    name = "billing"

    def __init__(self, context: ControllerContext, inventory: Inventory, caches: Sequence[MeteringCache] = ()) -> None:
        """`caches`: caches that evict attempts once the attempts are no longer live."""
        self._context = context
        self._inventory = inventory
        self._caches = caches
        self.every_s = context.intervals.billing_s
        self._began = context.clock.monotonic()
        self._stepped: datetime | None = None

    async def step(self) -> bool:
        self._restart_after_pause()
        live = await self._context.store.sent_attempts()
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
        """Return the charge of one attempt; None: no create was sent, its cloud was not listed, or nothing is new."""
        if row.attempt.create_sent_at is None or self._lacks_listings(row.attempt.line.offer.provider):
            return None
        decision = decide_charge(self._gather(row))
        return None if decision is None else _charge_of(decision)

    def _gather(self, row: Leased) -> ChargeFacts:
        attempt, context, inventory = row.attempt, self._context, self._inventory
        provider, stopped_by = attempt.line.offer.provider, None
        prices = moved_prices(context, inventory, attempt)
        if attempt.booted_at is None:  # its machine may not be listed yet; this call starts to follow the name
            missing_at = inventory.latest_possible_end(attempt)
        else:
            missing_at = inventory.missing_twice_at(provider, attempt.name, born_by=attempt.booted_at)
            if missing_at is not None:
                stopped_by = self_stopped_by(context, inventory, attempt, row.job)
        return ChargeFacts(
            job=row.job,
            attempt=attempt,
            caps=context.provider_of(attempt).caps,
            drain_budget=context.drain_budget,
            now=context.clock.now(),
            prices=tuple(prices),
            is_listed=inventory.is_listed(provider, attempt.name),
            missing_at=missing_at,
            self_stopped_by=stopped_by,
        )

    def _restart_after_pause(self) -> None:
        """Start again as a new process after a long pause, in which the monotonic clock may have stopped."""
        now = self._context.clock.now()
        if self._stepped and (now - self._stepped).total_seconds() > self.every_s + LISTED_S:
            self._began = self._context.clock.monotonic()
        self._stepped = now

    def _lacks_listings(self, provider: str) -> bool:
        """Return True while this process is new and has not listed a cloud twice since its start.

        A machine that vanished while no broker ran would otherwise be charged until now.
        """
        is_new = self._context.clock.monotonic() - self._began < LISTED_S
        return is_new and not self._inventory.has_listed_twice(provider, self._began)


def _charge_of(decision: ChargeDecision) -> Charge:
    attempt = decision.attempt
    return Charge(
        attempt_id=attempt.id,
        job_id=attempt.job_id,
        since=attempt.charged_to,
        to=decision.to,
        usd=decision.usd,
        traffic_usd=decision.traffic_usd,
        prices=decision.prices,
        signal=decision.signal,
        event=charge_event(decision),
    )
