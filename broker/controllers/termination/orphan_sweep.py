"""Cloud first, records second: what is listed under our prefix and answered for by nobody is destroyed."""

import logging
from collections.abc import Awaitable, Set
from datetime import datetime, timedelta

from broker.billing.accrual import traffic_owed, uncharged_after_end_usd
from broker.controllers.base.batch import decide_batch
from broker.controllers.base.context import ControllerContext
from broker.controllers.billing.charges import surplus
from broker.controllers.observation.inventory import Inventory
from broker.controllers.observation.listing import Listing
from broker.controllers.termination.destroy_queue import Destroys
from broker.controllers.termination.orphan_alerts import OrphanNews
from broker.domain.errors import BlobsUnavailable, Gone, ProviderError, StoreError, StoreUnavailable
from broker.domain.ids import attempt_of
from broker.domain.instance import InstanceState
from broker.domain.job import Attempt
from broker.domain.money import LedgerKind
from broker.lifecycle.orphans import Orphan, orphans, spared_message
from broker.ports import Blobs, Charge
from broker.runtime.background_tasks import gather_all
from trainer.contract import object_keys as keys

log = logging.getLogger(__name__)

AGAIN_S = 5.0
"""How soon a cloud is listed again that did not answer, or shows what is to be destroyed."""
OLD_S = 120.0
"""A listing of before is no reason to destroy anything any more, nor to charge for it."""


async def bought(blobs: Blobs, orphan: Orphan) -> bool | None:
    """Whether its spec lies in the blob store, where each lies before its machine is created; None: unknown."""
    try:
        return await blobs.get(keys.spec(orphan.id)) is not None
    except BlobsUnavailable:
        return None


class Sweep:
    """`report_only`: on a new database, where machines may have attempts that this database never knew."""

    name = "sweep"

    def __init__(
        self, context: ControllerContext, inventory: Inventory, destroys: Destroys, *, report_only: bool = False
    ) -> None:
        self._context = context
        self._inventory = inventory
        self._destroys = destroys
        self._first_seen: dict[str, float] = {}
        self._missing: set[str] = set()
        """Of these, what the latest listing has left out."""
        self._asked: dict[str, Orphan] = {}
        """Whose destruction was asked for, and not answered yet."""
        self._paid: set[str] = set()
        """Of these, what was charged since it is not listed any more."""
        self._news = OrphanNews(context)
        self._due = dict.fromkeys(context.providers, float("-inf"))
        self.report_only = report_only

    @property
    def every_s(self) -> float:
        """Until the first cloud is due: after `sweep_s`, or as soon as something can be done about what was found."""
        wait_s = min(self._due.values(), default=float("inf")) - self._context.clock.monotonic()
        return min(self._context.rhythm.sweep_s, max(self._again_s, wait_s))

    @property
    def _again_s(self) -> float:
        return min(AGAIN_S, self._context.rhythm.sweep_s)

    async def step(self) -> bool:
        now = self._context.clock.monotonic()
        due = [name for name, at in self._due.items() if at <= now + self._again_s / 2]
        listed = await gather_all(map(self._orphans, due))  # a cloud that hangs keeps no other's waiting
        found = [(name, orphan) for name, of_one in zip(due, listed, strict=True) for orphan in of_one]
        await decide_batch(self._context, self.name, found, self._deal_with)
        return False

    async def _orphans(self, provider: str) -> tuple[Orphan, ...]:
        """None where the cloud, or the database, did not answer: that is tried again soon."""
        self._again(provider, self._again_s)
        begun = self._context.clock.monotonic()
        listing = await self._listing(provider)
        if listing is None:
            return ()
        try:
            seen = [o for machines in listing.by_name.values() for o in machines]
            ids = [a for o in seen if (a := attempt_of(self._context.installation, o.handle.name)) is not None]
            known = await self._context.store.attempts_by_id(ids) if ids else {}
        except StoreUnavailable as e:
            log.warning("sweep: %s cannot be swept: %s", provider, e)
            return ()
        found = {_key(provider, one): one for one in orphans(self._context.installation, seen, known)}
        if listing.begun < begun:  # what it shows of others may have ended rightly since
            found = {key: one for key, one in found.items() if key in self._first_seen}
        self._paid = (self._paid & self._asked.keys()) - found.keys()
        found |= {key: one for key, one in self._asked.items() if key.startswith(f"{provider}/")}
        if listing.begun >= begun:
            self._again(provider, self._context.rhythm.sweep_s)
            self._forget(provider, set(found))
            self._news.keep(f"{provider}/", found.keys() | self._first_seen.keys())
        return tuple(found.values())

    async def _listing(self, provider: str) -> Listing | None:
        """A new one; else the latest, if it is not old: where few calls are answered a destroy of what was found before
        does not wait for the next listing.
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

    def _forget(self, provider: str, found: Set[str]) -> None:
        """What is left out twice in a row: once may be a listing's omission, so that one is listed again soon."""
        missing = {key for key in self._first_seen if key.startswith(f"{provider}/")} - found
        for key in missing & self._missing:
            del self._first_seen[key]
        self._missing = {key for key in self._missing if not key.startswith(f"{provider}/")}
        self._missing |= missing & self._first_seen.keys()
        if missing & self._first_seen.keys():
            self._sooner(provider, self._again_s)

    def _again(self, provider: str, in_s: float) -> None:
        self._due[provider] = self._context.clock.monotonic() + in_s

    async def _deal_with(self, one: tuple[str, Orphan]) -> None:
        """Destroyed once it has been an orphan for longer than a listing may lag."""
        provider, orphan = one
        key, handle, now = _key(provider, orphan), orphan.observed.handle, self._context.clock.monotonic()
        young_s = self._context.providers[provider].caps.list_lag_s - (now - self._first_seen.setdefault(key, now))
        if young_s > 0:
            self._sooner(provider, young_s)
            return
        ours = None if orphan.attempt else await bought(self._context.blobs, orphan)
        why_not = spared_message(orphan, report_only=self.report_only, bought=ours)
        log.warning(
            "orphan %s (%s) at %s: %s; %s", handle.name, handle.id, provider, orphan.why, why_not or "destroyed"
        )
        if why_not is not None:
            await self._told(self._news.spared(key, handle, why_not))
            return
        self._sooner(provider, self._again_s)
        # Also beforehand: who dies after the destruction cannot tell of it any more.
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
            await self._told(self._news.refused(key, handle, str(e)))
        del self._asked[key]
        await self._charge(provider, key, orphan)

    async def _told(self, telling: Awaitable[None]) -> None:
        """Another sweep tells it where the database does not answer."""
        try:
            await telling
        except StoreError as e:
            log.warning("sweep: people cannot be told: %s", e)

    def _sooner(self, provider: str, in_s: float) -> None:
        self._due[provider] = min(self._due[provider], self._context.clock.monotonic() + in_s)

    async def _charge(self, provider: str, key: str, orphan: Orphan) -> None:
        """What stands beside or after its attempt is charged to its job: the cloud will too. Fenced, so each second
        once. What is not listed any more is charged once, and no further while its destruction is not answered.
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
            log.warning("sweep: %s, which nobody answers for, cannot be charged: %s", handle.name, e)
        else:
            listing = self._inventory.latest(provider)
            if listing is not None and not listing.shows_one(handle):
                self._paid.add(key)

    def _late(self, provider: str, key: str, orphan: Orphan, attempt: Attempt) -> Charge | None:
        """The time after `ended`; None: nothing is owed. A charge of nothing would move the time up to which it is
        charged.
        """
        now, handle = self._context.clock.now(), orphan.observed.handle
        standing = [o for o in self._inventory.listed(provider, handle.name) if o.state is not InstanceState.GONE]
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
        """As the cloud says, but no later than it was seen: a cloud's clock may be ahead of the house's."""
        monotonic = self._context.clock.monotonic()
        seen = now - timedelta(seconds=monotonic - self._first_seen.get(key, monotonic))
        return None if orphan.born is None else min(orphan.born, seen)


def _key(provider: str, orphan: Orphan) -> str:
    return f"{provider}/{orphan.observed.handle.id}"
