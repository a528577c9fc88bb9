"""Cloud first, records second: what is listed under our prefix and answered for by nobody is destroyed."""

import logging
from datetime import datetime

from broker.controllers.context import Context
from broker.controllers.inventory import Inventory
from broker.decide.sweep import Orphan, orphans
from broker.domain.errors import Gone, ProviderError
from broker.domain.ids import attempt_of
from broker.domain.job import Attempt, LedgerEntry, LedgerKind
from broker.domain.money import usd

log = logging.getLogger(__name__)


class Sweep:
    """`report_only`: on a new or restored database, where machines may have attempts that this database never knew."""

    name = "sweep"

    def __init__(self, context: Context, inventory: Inventory, *, report_only: bool = False) -> None:
        self._context = context
        self._inventory = inventory
        self._first_seen: dict[str, float] = {}
        self.report_only = report_only
        self.every_s = context.rhythm.sweep_s

    async def step(self) -> bool:
        for provider in self._context.providers:
            try:
                await self._sweep(provider)
            except ProviderError as e:
                log.warning("sweep: %s cannot be listed: %s", provider, e)
        return False

    async def _sweep(self, provider: str) -> None:
        await self._inventory.refresh(provider, max_age_s=0.0)
        listing = self._inventory.latest(provider)
        seen = [o for machines in (listing.by_name.values() if listing else ()) for o in machines]
        ids = [a for o in seen if (a := attempt_of(self._context.installation, o.handle.name)) is not None]
        known = await self._context.store.attempts_by_id(ids) if ids else {}
        found = orphans(self._context.installation, seen, known)
        present = {f"{provider}/{o.observed.handle.id}" for o in found}
        gone = [key for key in self._first_seen if key.startswith(f"{provider}/") and key not in present]
        for key in gone:
            del self._first_seen[key]
        for orphan in found:
            await self._deal_with(provider, orphan)

    async def _deal_with(self, provider: str, orphan: Orphan) -> None:
        """Destroyed once it has been an orphan for longer than a listing may lag."""
        handle = orphan.observed.handle
        now = self._context.clock.monotonic()
        first = self._first_seen.setdefault(f"{provider}/{handle.id}", now)
        if now - first < self._context.providers[provider].caps.list_lag_s:
            return
        log.warning(
            "orphan %s at %s: %s%s", handle.name, provider, orphan.why, " (report only)" if self.report_only else ""
        )
        if self.report_only:
            return
        try:
            await self._context.providers[provider].destroy(handle)
        except Gone:
            return
        if orphan.attempt is not None and not orphan.attempt.live:
            await self._adjust(orphan.attempt)

    async def _adjust(self, attempt: Attempt) -> None:
        """The time after `ended` is charged too: the cloud will."""
        seconds = _since(attempt.ended_at, self._context.clock.now())
        late = usd(attempt.line.offer.usd_per_hour * seconds / 3600)
        note = "seen after its end"
        entry = LedgerEntry(
            job_id=attempt.job_id, attempt_id=attempt.id, kind=LedgerKind.ADJUSTMENT, usd=late, note=note
        )
        await self._context.store.adjust([entry])


def _since(ended_at: datetime | None, now: datetime) -> int:
    return max(0, int((now - ended_at).total_seconds())) if ended_at else 0
