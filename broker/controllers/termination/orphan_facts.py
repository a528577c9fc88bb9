"""Gathers the orphans of a cloud, and the facts about each for `orphan_decision.decide_orphan`."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from broker.controllers.base.context import ControllerContext
from broker.controllers.observation.inventory import Inventory
from broker.domain.errors import BlobsUnavailable, ProviderError, StoreUnavailable
from broker.domain.ids import attempt_of
from broker.lifecycle.decisions.orphan_decision import OrphanFacts
from broker.lifecycle.observation.listing import Listing
from broker.lifecycle.orphans import Orphan, orphans
from broker.ports import Blobs
from trainer.contract import object_keys

log = logging.getLogger(__name__)

OLD_S = 120.0
"""Age in seconds after which a listing is no reason to destroy or charge anything."""


async def was_bought(blobs: Blobs, orphan: Orphan) -> bool | None:
    """Return whether the blob store has the orphan's spec, which is written before every create; None: unknown."""
    try:
        return await blobs.get_range(object_keys.spec(orphan.id), 0, 1) is not None
    except BlobsUnavailable:
        return None


@dataclass(frozen=True, kw_only=True)
class ListedOrphan:
    """One orphan of a listing. `provider`: the cloud that lists it. `machine`: its id there."""

    provider: str
    machine: str
    orphan: Orphan

    @property
    def key(self) -> str:
        """Name of the machine in notices."""
        return f"{self.provider}/{self.machine}"


class OrphanFactsReader:
    """Reads listings, the database and the blob store."""

    def __init__(self, context: ControllerContext, inventory: Inventory) -> None:
        self._context, self._inventory = context, inventory

    async def listing(self, provider: str) -> Listing | None:
        """Return a new listing, otherwise the latest one unless it is too old; None: there is none.

        The latest one suffices to destroy a known orphan at a cloud that answers few calls.
        """
        try:
            await self._inventory.refresh(provider, max_age_s=0.0)
        except ProviderError as e:
            listing = self._inventory.latest(provider)
            if listing is not None and self._context.clock.monotonic() - listing.begun < OLD_S:
                return listing
            log.warning("sweep: %s cannot be swept: %s", provider, e)
            return None
        return self._inventory.latest(provider)

    async def orphans(self, provider: str, listing: Listing) -> Mapping[str, Orphan] | None:
        """Return the orphans of a listing by machine id; None: the database did not answer."""
        installation = self._context.installation
        machines = [machine for listed in listing.by_name.values() for machine in listed]
        attempts = (attempt_of(installation, machine.handle.name) for machine in machines)
        ids = [attempt for attempt in attempts if attempt is not None]
        try:
            known = await self._context.store.attempts_by_id(ids) if ids else {}
        except StoreUnavailable as e:
            log.warning("sweep: %s cannot be swept: %s", provider, e)
            return None
        return {orphan.observed.handle.id: orphan for orphan in orphans(installation, machines, known)}

    async def gather(self, row: ListedOrphan, first_listed: float, *, report_only: bool) -> OrphanFacts:
        """Return the facts about an orphan. The blob store is read only for an orphan that may be destroyed."""
        listed_s = self._context.clock.monotonic() - first_listed
        lag_s = self._context.providers[row.provider].caps.list_lag_s
        is_needed = row.orphan.attempt is None and listed_s >= lag_s
        is_bought = await was_bought(self._context.blobs, row.orphan) if is_needed else None
        return OrphanFacts(
            orphan=row.orphan, listed_s=listed_s, lag_s=lag_s, report_only=report_only, is_bought=is_bought
        )
