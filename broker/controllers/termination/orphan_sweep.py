"""Sweep: destroys machines that clouds list under the installation's prefix and that belong to no live attempt.

Steps for a cloud: list it, match machines with attempts (`orphans`), record them (`OrphanWatch`). For each orphan
gather `OrphanFacts`, call `decide_orphan`, and apply its decision: charge, destroy, charge again.
Facts: listings, attempts, the time since an orphan was first listed, specs in the blob store. Decisions: see
`OrphanStep`.
"""

import logging
from collections.abc import Awaitable, Sequence

from broker.controllers.base.batch import decide_batch
from broker.controllers.base.context import ControllerContext
from broker.controllers.observation.inventory import Inventory
from broker.controllers.termination.destroy_queue import Destroys
from broker.controllers.termination.orphan_alerts import OrphanNews
from broker.controllers.termination.orphan_charges import OrphanCharges
from broker.controllers.termination.orphan_facts import ListedOrphan, OrphanFactsReader
from broker.domain.errors import Gone, ProviderError, StoreError
from broker.domain.instance import OrphanMachine
from broker.lifecycle.decisions.orphan_decision import (
    OrphanDecision,
    OrphanStep,
    OrphanWatch,
    decide_orphan,
)
from broker.runtime.background_tasks import gather_all

log = logging.getLogger(__name__)

RECHECK_S = 5.0
"""Seconds until a cloud that did not answer, or that lists an orphan, is listed again."""


class Sweep:
    """Sweeps all clouds. `report_only`: destroy nothing, since a new database may lack the machines' attempts."""

    name = "sweep"

    def __init__(
        self, context: ControllerContext, inventory: Inventory, destroys: Destroys, *, report_only: bool = False
    ) -> None:
        self._context = context
        self._destroys = destroys
        self._watches = {name: OrphanWatch() for name in context.providers}
        self._facts = OrphanFactsReader(context, inventory)
        self._news, self._charges = OrphanNews(context), OrphanCharges(context, inventory)
        self._due = dict.fromkeys(context.providers, float("-inf"))
        self.report_only = report_only
        self._listed: dict[str, tuple[ListedOrphan, ...]] = {}

    @property
    def every_s(self) -> float:
        """Seconds until the first cloud is due: after `sweep_s`, or when an orphan can be destroyed."""
        wait_s = min(self._due.values(), default=float("inf")) - self._context.clock.monotonic()
        return min(self._context.intervals.sweep_s, max(self._again_s, wait_s))

    @property
    def _again_s(self) -> float:
        return min(RECHECK_S, self._context.intervals.sweep_s)

    async def step(self) -> bool:
        now = self._context.clock.monotonic()
        due_clouds = [name for name, at in self._due.items() if at <= now + self._again_s / 2]
        # Clouds are listed concurrently, so that a cloud that hangs delays no other.
        rows = [row for listed in await gather_all(map(self._rows, due_clouds)) for row in listed]
        await decide_batch(self._context, self.name, rows, self._deal_with)
        return False

    async def _rows(self, provider: str) -> tuple[ListedOrphan, ...]:
        """Return the orphans of a cloud. Empty if the cloud or the database did not answer; it is then due soon."""
        begun, watch = self._context.clock.monotonic(), self._watches[provider]
        self._due[provider] = begun + self._again_s
        listing = await self._facts.listing(provider)
        listed = None if listing is None else await self._facts.orphans(provider, listing)
        if listing is None or listed is None:
            return ()
        is_new = listing.begun >= begun
        rows = [
            ListedOrphan(provider=provider, machine=machine, orphan=orphan)
            for machine, orphan in watch.observe(listed, is_new=is_new).items()
        ]
        if is_new:
            self._due[provider] = self._context.clock.monotonic() + self._context.intervals.sweep_s
            if watch.missing_once:
                self._sooner(provider, self._again_s)
            known_keys = {row.key for row in rows} | {f"{provider}/{machine}" for machine in watch.first_listed}
            self._news.keep(f"{provider}/", known_keys)
        self._listed[provider] = tuple(rows)
        return tuple(rows)

    def orphans(self) -> Sequence[OrphanMachine]:
        """Return the orphans of each cloud's latest listing, destroyed ones included until the next listing."""
        return [_machine(row) for rows in self._listed.values() for row in rows]

    async def _deal_with(self, row: ListedOrphan) -> None:
        """Gather, decide and apply for one orphan."""
        now, watch = self._context.clock.monotonic(), self._watches[row.provider]
        first_listed = watch.first_listed.setdefault(row.machine, now)
        decision = decide_orphan(await self._facts.gather(row, first_listed, report_only=self.report_only))
        if decision.step is OrphanStep.WAIT:
            self._sooner(row.provider, decision.wait_s)
            return
        self._log(row, decision)
        if decision.step is OrphanStep.SPARE:
            await self._post(self._news.spared(row.key, row.orphan.observed.handle, decision.message))
        else:
            await self._destroy(row)

    def _log(self, row: ListedOrphan, decision: OrphanDecision) -> None:
        handle, effect = row.orphan.observed.handle, decision.message or "destroyed"
        log.warning("orphan %s (%s) at %s: %s; %s", handle.name, handle.id, row.provider, row.orphan.why, effect)

    async def _destroy(self, row: ListedOrphan) -> None:
        """Charge an orphan, destroy it, and charge it again. This process may end before the second charge."""
        provider, handle, destroy_requests = row.provider, row.orphan.observed.handle, self._watches[row.provider].asked
        self._sooner(provider, self._again_s)
        await self._charge(row)
        destroy_requests[row.machine] = row.orphan
        try:
            if not await self._destroys.ask(provider, handle):
                return
        except Gone:
            del destroy_requests[row.machine]
            return
        except ProviderError as e:
            log.warning("orphan %s at %s cannot be destroyed, it stays on the bill: %s", handle.name, provider, e)
            await self._post(self._news.refused(row.key, handle, str(e)))
        del destroy_requests[row.machine]
        await self._charge(row)

    async def _charge(self, row: ListedOrphan) -> None:
        """Charge an orphan, but not again while its destroy is unanswered and no listing shows it."""
        watch = self._watches[row.provider]
        if row.orphan.attempt is None or row.machine in watch.charged:
            return
        first_listed = watch.first_listed.get(row.machine, self._context.clock.monotonic())
        if await self._charges.charge(row, first_listed):
            watch.charged.add(row.machine)

    async def _post(self, posting: Awaitable[None]) -> None:
        """Post a notice. If the database does not answer, a later sweep posts it."""
        try:
            await posting
        except StoreError as e:
            log.warning("sweep: a notice cannot be posted: %s", e)

    def _sooner(self, provider: str, in_s: float) -> None:
        self._due[provider] = min(self._due[provider], self._context.clock.monotonic() + in_s)


def _machine(row: ListedOrphan) -> OrphanMachine:
    observed = row.orphan.observed
    return OrphanMachine(
        provider=row.provider, id=row.machine, name=observed.handle.name, why=row.orphan.why, since=row.orphan.born,
        usd_per_hour=observed.usd_per_hour,
    )  # fmt: skip
