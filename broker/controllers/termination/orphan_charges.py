"""Charges orphans to the jobs of their attempts, because the cloud bills them."""

import logging
from datetime import timedelta

from broker.controllers.base.context import ControllerContext
from broker.controllers.billing.charges import surplus
from broker.controllers.observation.inventory import Inventory
from broker.controllers.termination.orphan_facts import ListedOrphan
from broker.domain.errors import StoreUnavailable
from broker.domain.job import Attempt
from broker.domain.money import LedgerKind
from broker.lifecycle.decisions.orphan_decision import LateMachineFacts, late_amounts
from broker.ports import Charge

log = logging.getLogger(__name__)


class OrphanCharges:
    """Charges extra machines of live attempts, and machines of ended attempts."""

    def __init__(self, context: ControllerContext, inventory: Inventory) -> None:
        self._context, self._inventory = context, inventory

    async def charge(self, row: ListedOrphan, first_listed: float) -> bool:
        """Charge an orphan of an attempt. Return True if it was charged and the latest listing no longer shows it.

        The charge is fenced, so each second is charged once. `first_listed`: monotonic time.
        """
        store, orphan, handle = self._context.store, row.orphan, row.orphan.observed.handle
        try:
            attempt = (await store.attempts_by_id([orphan.id]))[orphan.id]
            if attempt.live:
                charge = surplus(self._context, self._inventory, attempt)
            else:
                charge = self._late_charge(row, attempt, first_listed)
            if charge is not None:
                await store.charge([charge])
        except StoreUnavailable as e:
            log.warning("sweep: orphan %s cannot be charged: %s", handle.name, e)
            return False
        listing = self._inventory.latest(row.provider)
        return listing is not None and not listing.shows_machine(handle)

    def _late_charge(self, row: ListedOrphan, attempt: Attempt, first_listed: float) -> Charge | None:
        """Return the charge for the time after the attempt's end; None: nothing is owed."""
        clock, listing = self._context.clock, self._inventory.latest(row.provider)
        now = clock.now()
        facts = LateMachineFacts(
            orphan=row.orphan,
            attempt=attempt,
            now=now,
            first_listed_at=now - timedelta(seconds=clock.monotonic() - first_listed),
            existing=len(listing.existing(row.orphan.observed.handle.name)) if listing else 0,
        )
        amounts = late_amounts(facts)
        if amounts is None:
            return None
        usd, traffic_usd = amounts
        return Charge(
            attempt_id=attempt.id,
            job_id=attempt.job_id,
            since=attempt.charged_to,
            to=max(now, attempt.charged_to or now),
            usd=usd,
            traffic_usd=traffic_usd,
            kind=LedgerKind.ADJUSTMENT,
            note="seen after its end",
        )
