"""Every live attempt is charged by its provider's quantum and for its traffic; near the cap or its time it is told."""

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
from broker.controllers.billing.charges import moved_prices
from broker.controllers.billing.self_stop import self_stopped_by
from broker.controllers.observation.inventory import Inventory
from broker.domain.ids import AttemptId
from broker.domain.instance import Caps
from broker.domain.job import Attempt, Event, Signal
from broker.domain.money import ZERO, show
from broker.lifecycle.signals import due_signal
from broker.ports import Charge, Leased

log = logging.getLogger(__name__)

LISTED_S = 60.0
"""How long a process that begins, or was frozen for so long, waits for two listings of a cloud; caps are held all the
same after that."""
PROOF_S = 15.0
"""A proof of absence takes as long as listings may lag, and so much for the looks themselves."""


class MeteringCache(Protocol):
    """What a process remembers of attempts; forgetting one that lives only makes it slower to judge."""

    def keep(self, live: Set[AttemptId]) -> None: ...


class Billing:
    """Reads without a lease and writes fenced by `charged_to`: two brokers cannot charge the same time twice."""

    name = "billing"

    def __init__(
        self, context: ControllerContext, inventory: Inventory, memories: Sequence[MeteringCache] = ()
    ) -> None:
        """`memories`: told which attempts live; any broker may have ended the others."""
        self._context = context
        self._inventory = inventory
        self._memories = memories
        self.every_s = context.rhythm.billing_s
        self._began = context.clock.monotonic()
        self._stepped: datetime | None = None

    async def step(self) -> bool:
        self._thaw()
        live = await self._context.store.live_attempts()
        for memory in self._memories:
            memory.keep({one.attempt.id for one in live})
        # What runs in a cloud that only another broker knows is charged by that one.
        own = [one for one in live if one.attempt.line.offer.provider in self._context.providers]
        charges = [c for c in map(self._safely, own) if c is not None]
        if charges:
            await self._context.store.charge(charges)
        return False

    def _safely(self, one: Leased) -> Charge | None:
        """No attempt that cannot be charged keeps the others from their caps."""
        try:
            return self._charge(one)
        except Exception:
            log.exception("billing: attempt %s of job %s cannot be charged", one.attempt.id, one.job.id)
            return None

    def _charge(self, one: Leased) -> Charge | None:
        attempt, job, context = one.attempt, one.job, self._context
        if attempt.create_sent_at is None:
            return None
        now, caps = context.clock.now(), context.provider_of(attempt).caps
        if self._is_blind(attempt.line.offer.provider):
            return None
        prices = moved_prices(context, self._inventory, attempt)
        known = replace(attempt, prices=(*attempt.prices, *prices)) if prices else attempt
        until = self._until(one, known, now, caps)
        due, traffic = uncharged_usd(known, until), traffic_owed(known, now)
        signal = due_signal(known, job, caps, self._stood_until(one, now), context.tempo)
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
            event=_told(one, signal, job.spent_usd + due + traffic, now),
        )

    def _thaw(self) -> None:
        """After a time in which it did nothing it knows as little as a new one; a monotonic clock may have stood."""
        now = self._context.clock.now()
        if self._stepped and (now - self._stepped).total_seconds() > self.every_s + LISTED_S:
            self._began = self._context.clock.monotonic()
        self._stepped = now

    def _is_blind(self, provider: str) -> bool:
        """Has not listed this cloud twice yet: what went while no broker was there would be charged until now."""
        begins = self._context.clock.monotonic() - self._began < LISTED_S
        return begins and not self._inventory.listed_twice(provider, self._began)

    def _stood_until(self, one: Leased, now: datetime) -> datetime:
        """What is listed no more, by two listings, ended by itself at the latest, where all brokers were away."""
        attempt, stood = one.attempt, one.attempt.booted_at
        provider = attempt.line.offer.provider
        if stood is None or self._inventory.unseen_since(provider, attempt.name, born_by=stood) is None:
            return now
        return min(now, self_stopped_by(self._context, self._inventory, attempt, one.job) or now)

    def _until(self, one: Leased, attempt: Attempt, now: datetime, caps: Caps) -> datetime:
        """What listings leave out is charged no further while its absence cannot be proven, or its attempt not ended:
        no charge is ever taken back. Where it stands after all, the next charge makes up for it. What went while all
        brokers were away is charged at its end alone: how long it may have stood counts from the charge before.
        """
        provider, born_by = attempt.line.offer.provider, attempt.booted_at
        shown, stood_until = self._inventory.shows(provider, attempt.name), self._stood_until(one, now)
        if stood_until < now:
            return attempt.charged_to or attempt.create_sent_at or now
        until = billed_until(attempt, now, caps.list_lag_s + PROOF_S, shown=shown)
        if born_by is None:  # it may not be listed yet; from here on it is known when it was
            unseen = self._inventory.stood_until(attempt)
        else:
            unseen = self._inventory.unseen_since(provider, attempt.name, born_by=born_by)
        return min(until, unseen or until)


def _told(one: Leased, signal: Signal | None, spent: Decimal, now: datetime) -> Event | None:
    if signal is None:
        return None
    if signal is Signal.CAP:
        message = f"{show(spent)} of {show(one.job.cap_usd)} spent: checkpoint and stop"
        return event(one.job, "job.cap_near", message, attempt=one.attempt)
    return event(one.job, "job.out_of_time", out_of_time_message(one.job, now), attempt=one.attempt)
