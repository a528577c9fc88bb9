"""Cloud first, records second: what is listed under our prefix and answered for by nobody is destroyed."""

import asyncio
import logging

from broker.controllers.context import Context
from broker.controllers.each import each
from broker.controllers.inventory import Inventory
from broker.decide.billing import owed, traffic_owed
from broker.decide.sweep import Orphan, orphans, spared
from broker.domain.errors import BlobsUnavailable, Gone, ProviderError
from broker.domain.ids import attempt_of
from broker.domain.job import Attempt, LedgerKind
from broker.ports import Blobs, Charge
from trainer.contract import keys

log = logging.getLogger(__name__)


async def bought(blobs: Blobs, orphan: Orphan) -> bool | None:
    """Whether its spec lies in the blob store, where each lies before its machine is created; None: unknown."""
    try:
        return await blobs.get(keys.spec(orphan.id)) is not None
    except BlobsUnavailable:
        return None


class Sweep:
    """`report_only`: on a new database, where machines may have attempts that this database never knew."""

    name = "sweep"

    def __init__(self, context: Context, inventory: Inventory, *, report_only: bool = False) -> None:
        self._context = context
        self._inventory = inventory
        self._first_seen: dict[str, float] = {}
        self.report_only = report_only
        self.every_s = context.rhythm.sweep_s

    async def step(self) -> bool:
        providers = list(self._context.providers)
        listed = await asyncio.gather(*map(self._orphans, providers))  # a cloud that hangs keeps no other's waiting
        found = [(name, orphan) for name, of_one in zip(providers, listed, strict=True) for orphan in of_one]
        await each(self._context, self.name, found, self._deal_with)
        return False

    async def _orphans(self, provider: str) -> tuple[Orphan, ...]:
        """None of a cloud that did not answer."""
        try:
            await self._inventory.refresh(provider, max_age_s=0.0)
        except ProviderError as e:
            log.warning("sweep: %s cannot be listed: %s", provider, e)
            return ()
        listing = self._inventory.latest(provider)
        seen = [o for machines in (listing.by_name.values() if listing else ()) for o in machines]
        ids = [a for o in seen if (a := attempt_of(self._context.installation, o.handle.name)) is not None]
        known = await self._context.store.attempts_by_id(ids) if ids else {}
        found = orphans(self._context.installation, seen, known)
        present = {f"{provider}/{o.observed.handle.id}" for o in found}
        gone = [key for key in self._first_seen if key.startswith(f"{provider}/") and key not in present]
        for key in gone:
            del self._first_seen[key]
        return found

    async def _deal_with(self, one: tuple[str, Orphan]) -> None:
        """Destroyed once it has been an orphan for longer than a listing may lag."""
        provider, orphan = one
        handle = orphan.observed.handle
        now = self._context.clock.monotonic()
        first = self._first_seen.setdefault(f"{provider}/{handle.id}", now)
        if now - first < self._context.providers[provider].caps.list_lag_s:
            return
        ours = None if orphan.attempt else await bought(self._context.blobs, orphan)
        why_not = spared(orphan, report_only=self.report_only, bought=ours)
        log.warning(
            "orphan %s (%s) at %s: %s; %s", handle.name, handle.id, provider, orphan.why, why_not or "destroyed"
        )
        if why_not is not None:
            return
        try:
            await self._context.providers[provider].destroy(handle)
        except Gone:
            return
        except ProviderError as e:
            log.warning("orphan %s at %s cannot be destroyed, it stays on the bill: %s", handle.name, provider, e)
        if orphan.attempt is not None and not orphan.attempt.live:
            await self._charge(orphan.attempt)

    async def _charge(self, attempt: Attempt) -> None:
        """The time after `ended` is charged too: the cloud will. Cumulative and fenced, so each second once."""
        now = self._context.clock.now()
        late = Charge(
            attempt_id=attempt.id,
            job_id=attempt.job_id,
            since=attempt.charged_to,
            to=max(now, attempt.charged_to or now),
            usd=owed(attempt, now),
            traffic_usd=traffic_owed(attempt, now),
            kind=LedgerKind.ADJUSTMENT,
            note="seen after its end",
        )
        await self._context.store.charge([late])
