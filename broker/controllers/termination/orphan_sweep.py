"""Sweep: destroys machines that clouds list under the installation's prefix and that belong to no live attempt.

Steps for a cloud: list it, match machines with attempts, wait until an orphan is older than the list lag, destroy it,
charge its time. Facts: listings, attempts, specs in the blob store. Decisions: spare, destroy, charge.
"""

import logging
from collections.abc import Awaitable, Set
from datetime import datetime, timedelta

from broker.billing.accrual import traffic_owed, uncharged_after_end_usd
from broker.controllers.base.batch import decide_batch
from broker.controllers.base.context import ControllerContext
from broker.controllers.billing.charges import surplus
from broker.controllers.observation.inventory import Inventory
from broker.controllers.termination.destroy_queue import Destroys
from broker.controllers.termination.orphan_alerts import OrphanNews
from broker.domain.errors import BlobsUnavailable, Gone, ProviderError, StoreError, StoreUnavailable
from broker.domain.ids import attempt_of
from broker.domain.instance import InstanceState
from broker.domain.job import Attempt
from broker.domain.money import LedgerKind
from broker.lifecycle.observation.listing import Listing
from broker.lifecycle.orphans import Orphan, orphans, spared_message
from broker.ports import Blobs, Charge
from broker.runtime.background_tasks import gather_all
from trainer.contract import object_keys as keys

log = logging.getLogger(__name__)

AGAIN_S = 5.0
"""Seconds until a cloud is listed again that did not answer, or that lists an orphan."""
OLD_S = 120.0
"""Age in seconds after which a listing is no reason to destroy or charge anything."""


async def bought(blobs: Blobs, orphan: Orphan) -> bool | None:
    """Return whether an orphan's spec is in the blob store, where it is before a create; None: unknown."""
    try:
        return await blobs.get(keys.spec(orphan.id)) is not None
    except BlobsUnavailable:
        return None


class Sweep:
    """Sweeps all clouds. `report_only`: destroy nothing, since a new database may lack the machines' attempts."""

    name = "sweep"

    def __init__(
        self, context: ControllerContext, inventory: Inventory, destroys: Destroys, *, report_only: bool = False
    ) -> None:
        self._context = context
        self._inventory = inventory
        self._destroys = destroys
        self._first_seen: dict[str, float] = {}
        self._missing_once: set[str] = set()
        """Orphans of `_first_seen` that the latest listing omits."""
        self._asked: dict[str, Orphan] = {}
        """Orphans whose destroy was sent and is not answered yet."""
        self._paid: set[str] = set()
        """Orphans of `_asked` that were charged after they were last listed."""
        self._news = OrphanNews(context)
        self._due = dict.fromkeys(context.providers, float("-inf"))
        self.report_only = report_only

    @property
    def every_s(self) -> float:
        """Seconds until the first cloud is due: after `sweep_s`, or when an orphan can be destroyed."""
        wait_s = min(self._due.values(), default=float("inf")) - self._context.clock.monotonic()
        return min(self._context.intervals.sweep_s, max(self._again_s, wait_s))

    @property
    def _again_s(self) -> float:
        return min(AGAIN_S, self._context.intervals.sweep_s)

    async def step(self) -> bool:
        now = self._context.clock.monotonic()
        due = [name for name, at in self._due.items() if at <= now + self._again_s / 2]
        listed = await gather_all(map(self._orphans, due))  # concurrently, so that a cloud that hangs delays no other
        orphans_found = [(name, orphan) for name, found in zip(due, listed, strict=True) for orphan in found]
        await decide_batch(self._context, self.name, orphans_found, self._deal_with)
        return False

    async def _orphans(self, provider: str) -> tuple[Orphan, ...]:
        """Return the orphans of a cloud; empty if the cloud or the database did not answer, which is repeated soon."""
        self._again(provider, self._again_s)
        begun = self._context.clock.monotonic()
        listing = await self._listing(provider)
        if listing is None:
            return ()
        try:
            machines = [machine for listed in listing.by_name.values() for machine in listed]
            ids = [
                attempt
                for machine in machines
                if (attempt := attempt_of(self._context.installation, machine.handle.name)) is not None
            ]
            known = await self._context.store.attempts_by_id(ids) if ids else {}
        except StoreUnavailable as e:
            log.warning("sweep: %s cannot be swept: %s", provider, e)
            return ()
        orphans_found = {
            _key(provider, orphan): orphan for orphan in orphans(self._context.installation, machines, known)
        }
        if listing.begun < begun:  # other machines of an old listing may have been destroyed since
            orphans_found = {key: orphan for key, orphan in orphans_found.items() if key in self._first_seen}
        self._paid = (self._paid & self._asked.keys()) - orphans_found.keys()
        orphans_found |= {key: orphan for key, orphan in self._asked.items() if key.startswith(f"{provider}/")}
        if listing.begun >= begun:
            self._again(provider, self._context.intervals.sweep_s)
            self._forget(provider, set(orphans_found))
            self._news.keep(f"{provider}/", orphans_found.keys() | self._first_seen.keys())
        return tuple(orphans_found.values())

    async def _listing(self, provider: str) -> Listing | None:
        """Return a new listing, otherwise the latest one if it is not old; None: there is none.

        So the destroy of a known orphan does not wait for a cloud that answers few calls.
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

    def _forget(self, provider: str, orphans_found: Set[str]) -> None:
        """Forget orphans that two listings in a row omit. After one omission the cloud is listed again soon."""
        missing = {key for key in self._first_seen if key.startswith(f"{provider}/")} - orphans_found
        for key in missing & self._missing_once:
            del self._first_seen[key]
        self._missing_once = {key for key in self._missing_once if not key.startswith(f"{provider}/")}
        self._missing_once |= missing & self._first_seen.keys()
        if missing & self._first_seen.keys():
            self._sooner(provider, self._again_s)

    def _again(self, provider: str, in_s: float) -> None:
        self._due[provider] = self._context.clock.monotonic() + in_s

    async def _deal_with(self, row: tuple[str, Orphan]) -> None:
        """Destroy an orphan once it is older than the list lag, unless it is spared."""
        provider, orphan = row
        key, handle, now = _key(provider, orphan), orphan.observed.handle, self._context.clock.monotonic()
        young_s = self._context.providers[provider].caps.list_lag_s - (now - self._first_seen.setdefault(key, now))
        if young_s > 0:
            self._sooner(provider, young_s)
            return
        is_bought = None if orphan.attempt else await bought(self._context.blobs, orphan)
        spared_reason = spared_message(orphan, report_only=self.report_only, bought=is_bought)
        log.warning(
            "orphan %s (%s) at %s: %s; %s", handle.name, handle.id, provider, orphan.why, spared_reason or "destroyed"
        )
        if spared_reason is not None:
            await self._post(self._news.spared(key, handle, spared_reason))
            return
        self._sooner(provider, self._again_s)
        # Charge before the destroy too, since this process may end before it can charge afterwards.
        await self._charge(provider, key, orphan)
        self._asked[key] = orphan
        try:
            if not await self._destroys.ask(provider, handle):
                return
        except Gone:
            del self._asked[key]
            return
        except ProviderError as e:
            log.warning("orphan %s at %s cannot be destroyed, it stays on the bill: %s", handle.name, provider, e)
            await self._post(self._news.refused(key, handle, str(e)))
        del self._asked[key]
        await self._charge(provider, key, orphan)

    async def _post(self, posting: Awaitable[None]) -> None:
        """Post a notice. If the database does not answer, a later sweep posts it."""
        try:
            await posting
        except StoreError as e:
            log.warning("sweep: a notice cannot be posted: %s", e)

    def _sooner(self, provider: str, in_s: float) -> None:
        self._due[provider] = min(self._due[provider], self._context.clock.monotonic() + in_s)

    async def _charge(self, provider: str, key: str, orphan: Orphan) -> None:
        """Charge an extra or late machine to its job, as the cloud does.

        The charge is fenced, so each second is charged once. A machine that is no longer listed is charged once, and
        not again while its destroy is unanswered.
        """
        if orphan.attempt is None or key in self._paid:
            return
        store, handle = self._context.store, orphan.observed.handle
        try:
            attempt = (await store.attempts_by_id([orphan.id]))[orphan.id]
            if attempt.live:
                charge = surplus(self._context, self._inventory, attempt)
            else:
                charge = self._late(provider, key, orphan, attempt)
            if charge is not None:
                await store.charge([charge])
        except StoreUnavailable as e:
            log.warning("sweep: orphan %s cannot be charged: %s", handle.name, e)
        else:
            listing = self._inventory.latest(provider)
            if listing is not None and not listing.shows_machine(handle):
                self._paid.add(key)

    def _late(self, provider: str, key: str, orphan: Orphan, attempt: Attempt) -> Charge | None:
        """Return the charge for the time after `ended`; None: nothing is owed.

        A charge of zero would move `charged_to`.
        """
        now, handle = self._context.clock.now(), orphan.observed.handle
        standing = [
            machine
            for machine in self._inventory.listed(provider, handle.name)
            if machine.state is not InstanceState.GONE
        ]
        machines = uncharged_after_end_usd(attempt, handle, self._born(key, orphan, now), now, standing=len(standing))
        traffic = traffic_owed(attempt, now)
        if not machines and not traffic:
            return None
        return Charge(
            attempt_id=attempt.id,
            job_id=attempt.job_id,
            since=attempt.charged_to,
            to=max(now, attempt.charged_to or now),
            usd=machines,
            traffic_usd=traffic,
            kind=LedgerKind.ADJUSTMENT,
            note="seen after its end",
        )

    def _born(self, key: str, orphan: Orphan, now: datetime) -> datetime | None:
        """Return the cloud's creation time, at most the first sighting, since a cloud's clock may be ahead."""
        monotonic = self._context.clock.monotonic()
        machines = now - timedelta(seconds=monotonic - self._first_seen.get(key, monotonic))
        return None if orphan.born is None else min(orphan.born, machines)


def _key(provider: str, orphan: Orphan) -> str:
    return f"{provider}/{orphan.observed.handle.id}"
