"""Termination: destroys terminating attempts until their absence is proven, and then closes their ledger.

Steps: list the clouds; for each attempt destroy, or, once its launcher is dead and its machines are proven absent, read
the final report and settle. Facts: launcher, listings, final report, drain request, prices.
Decisions: keep the machine for inspection, destroy again, wait for the final report, settle.
"""

from collections.abc import Sequence
from dataclasses import replace

from broker.billing.accrual import refused
from broker.controllers.base.batch import decide_batch
from broker.controllers.base.claims import Claims
from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import event, is_reported
from broker.controllers.billing.charges import moved_prices, self_stopped_by, surplus, up_to
from broker.controllers.observation.heartbeats import read_final
from broker.controllers.observation.inventory import Inventory
from broker.controllers.observation.restored_attempts import drain_reason_sent
from broker.controllers.provisioning.creates_in_flight import CreatesInFlight
from broker.controllers.termination.destroy_queue import Destroys
from broker.domain.errors import BlobsUnavailable, Gone, GpubrokerError, ProviderError
from broker.domain.job import Attempt, Event, Handle, Job, Reason
from broker.domain.money import LedgerEntry, LedgerKind, show
from broker.estimator.planning.corrections import observed
from broker.lifecycle.account_refusals import refused_in_a_row
from broker.lifecycle.host_reputation import MAX_ATTEMPTS, MEMORY_S, WEIGHTS, judge_host, weight
from broker.lifecycle.liveness import TAKEN_AWAY, recorded_machines
from broker.lifecycle.recovery import adjustment_message
from broker.lifecycle.state_machine import AttemptEvent
from broker.lifecycle.transitions import after_attempt, due_in_s, end_reason, inspection_end, step
from broker.ports import Change, Lane, Leased
from broker.runtime.background_tasks import gather_all
from trainer.contract import object_keys as keys

STUCK_S = 120.0
"""Seconds after which an event reports what keeps an attempt from ending."""
AGAIN_S = 1.0
"""Seconds until an attempt that does not end yet is due: less than a round, so that other brokers may poll it."""


class Termination:
    """Claims attempts that are terminating, and never gives up."""

    name = "termination"

    def __init__(
        self, context: ControllerContext, inventory: Inventory, launchers: CreatesInFlight, destroys: Destroys
    ) -> None:
        self._context = context
        self._inventory = inventory
        self._launchers = launchers
        self._destroys = destroys
        self._claims = Claims(context, Lane.TERMINATION)
        self.every_s = context.intervals.poll_s

    async def step(self) -> bool:
        async with self._claims.leased(limit=self._context.intervals.claim, turns=self._context.at_once) as leased:
            return bool(leased) and await self._end_all(leased)

    async def _end_all(self, leased: Sequence[Leased]) -> bool:
        context = self._context
        # Attempts at a cloud that did not answer do not end in this round.
        unlisted = await self._inventory.refresh_all({row.attempt.line.offer.provider for row in leased})
        try:
            ends = await decide_batch(context, self.name, leased, lambda row: self._end(row, unlisted))
        except (GpubrokerError, TimeoutError):
            await context.store.release([], [row.attempt for row in leased], due_in_s=context.intervals.look_s)
            raise
        decided = {row.attempt.id for row, _ in ends}
        if undecided := [row.attempt for row in leased if row.attempt.id not in decided]:
            await context.store.release([], undecided, due_in_s=context.intervals.look_s)
        written = await context.store.apply([change for _, change in ends])
        for (row, change), ok in zip(ends, written, strict=True):
            if not ok:
                # Billing charged the attempt meanwhile: settle at the next poll, not when the lease expires.
                await context.store.release([], [row.attempt], due_in_s=0.0)
            elif change.attempt and not change.attempt[1].live:
                await self._clean_up(row.attempt)
        return len(leased) == context.intervals.claim and not unlisted

    async def _end(self, row: Leased, unlisted: set[str]) -> Change:
        attempt = row.attempt
        provider = attempt.line.offer.provider
        dead_since = await self._launchers.dead_since(attempt)
        absent_at = latest_end = None
        if provider not in unlisted:
            latest_end = None if attempt.booted_at else self._inventory.latest_possible_end(attempt)
            if dead_since is not None:
                absence = self._inventory.absence(provider, attempt.name, dead_since, born_by=attempt.booted_at)
                absent_at = absence.proven_at
        if absent_at is None:
            standing = provider not in unlisted and self._inventory.is_listed(provider, attempt.name)
            again_s = 0.0 if provider in unlisted else min(AGAIN_S, self._context.intervals.look_s)
            inspection = self._hold(row)
            return inspection or await self._destroy(
                row, standing=standing, launcher_dead=dead_since is not None, again_s=again_s
            )
        if refused(attempt):
            absent_at = attempt.create_sent_at or absent_at
        alone_until = self_stopped_by(self._context, self._inventory, attempt, row.job)
        absent_at = min(filter(None, (absent_at, latest_end, alone_until)))
        # Never move `absent_at` before `charged_to`: another broker may have charged up to it, and charges are final.
        absent_at = attempt.absent_at or max(absent_at, attempt.charged_to or absent_at)
        absent = replace(attempt, absent_at=absent_at)
        try:
            final = attempt.final or await read_final(self._context, attempt.id)
            drain_reason = await drain_reason_sent(self._context, attempt.id, final) if final else None
        except BlobsUnavailable:
            # The job continues once the final report can be read. Charges end here.
            return Change(attempt=(attempt, absent), due_in_s=self._context.intervals.look_s)
        absent = replace(absent, final=final, reason=drain_reason or attempt.reason)
        change = self._settle(row, absent, image_refused=await self._image_refused(attempt))
        if change.attempt is not None:
            await self._judge_host(change.attempt[1])
        return change

    async def _image_refused(self, attempt: Attempt) -> bool:
        """Return True if this attempt and an earlier one ended for the trainer's image, and none pulled it since.

        The host is blocked for a while, so that the next attempt tries another host.
        """
        if attempt.reason is not Reason.IMAGE:
            return False
        offer, store = attempt.line.offer, self._context.store
        await store.block_offer(offer.host_key, attempt.detail, for_s=self._context.intervals.sold_out_s)
        others = [row for row in await store.attempts(attempt.job_id) if row.id != attempt.id]
        return any(row.reason is Reason.IMAGE for row in refused_in_a_row(others))

    def _hold(self, row: Leased) -> Change | None:
        """Return the change that keeps a failed job's machine for inspection; None: its time is over, or it is gone."""
        until, now = inspection_end(row.attempt, row.job), self._context.clock.now()
        listed = recorded_machines(
            row.attempt, self._inventory.listed(row.attempt.line.offer.provider, row.attempt.name)
        )
        if until is None or now >= until or (listed and all(machine.state in TAKEN_AWAY for machine in listed)):
            return None
        wait_s = min(self._context.intervals.look_s, (until - now).total_seconds())
        return Change(attempt=(row.attempt, row.attempt), due_in_s=wait_s)

    # ------------------------------------------------------------------------------------------------------- destroy

    async def _destroy(self, row: Leased, *, standing: bool, launcher_dead: bool, again_s: float) -> Change:
        """Destroy the machines of an attempt.

        `again_s`: seconds until the attempt is due; 0 if the cloud did not answer, so that another broker, which may
        reach it, can claim the row.
        """
        # A proof of another broker holds until a listing shows the machine.
        attempt = row.attempt
        if standing:
            attempt = replace(attempt, absent_at=None, handles=attempt.handles or self._handles(attempt))
        provider = attempt.line.offer.provider
        errors = await gather_all(self._ask(provider, handle) for handle in self._handles(attempt))
        error = next(filter(None, errors), "")
        if not launcher_dead:
            await self._launchers.stop(attempt)
        if not error and self._takes_long(row):
            error = self._kept_by(attempt, standing=standing, launcher_dead=launcher_dead)
        charge = surplus(self._context, self._inventory, attempt)
        if not error:
            return Change(attempt=(row.attempt, attempt), charge=charge, due_in_s=again_s)
        return replace(self._failed(row, attempt, error), charge=charge, due_in_s=again_s)

    def _kept_by(self, attempt: Attempt, *, standing: bool, launcher_dead: bool) -> str:
        """Return what the end of an attempt waits for, in one line; empty: nothing unusual."""
        name, provider = attempt.name, attempt.line.offer.provider
        if not launcher_dead:
            return (
                f"launcher {attempt.launched_by!r} of {name} at {provider} cannot be proven dead, so a machine may "
                "still appear; end that launcher's process, or bring back its state folder; "
                f"if it is lost for good, confirm it: gpubroker launcher lost {attempt.id}"
            )
        if trouble := self._inventory.trouble(provider):
            return f"{name} cannot be proven gone, and is charged: {provider} cannot be listed: {trouble}"
        if standing:
            destroyed = f"{provider} has accepted the destroy of {name} and still lists it"
            return f"{destroyed}; if that lasts, end it in its console"
        return ""

    async def _ask(self, provider: str, handle: Handle) -> str:
        """Send a destroy. Return why the cloud has not accepted it, in one line; empty: no error so far."""
        try:
            await self._destroys.ask(provider, handle)
        except Gone:
            return ""
        except ProviderError as e:
            return f"destroy of {handle.id} at {provider}: {e}"
        return ""

    def _takes_long(self, row: Leased) -> bool:
        since = inspection_end(row.attempt, row.job) or row.attempt.terminating_since or self._context.clock.now()
        return (self._context.clock.now() - since).total_seconds() > STUCK_S

    def _handles(self, attempt: Attempt) -> tuple[Handle, ...]:
        """Return the recorded machines and all others that are listed under the attempt's name."""
        listed = self._inventory.listed(attempt.line.offer.provider, attempt.name)
        known = {h.id: h for h in attempt.handles}
        return tuple({**known, **{o.handle.id: o.handle for o in listed}}.values())

    def _failed(self, row: Leased, attempt: Attempt, message: str) -> Change:
        moved = step(attempt, AttemptEvent.DESTROY_ERROR, self._context.clock.now()).attempt
        failures = moved.destroy_failures + 1
        moved = replace(moved, destroy_failures=failures, detail=message)
        report = event(row.job, "attempt.destroy_failed", f"{message} ({failures} times)", attempt=moved)
        alert = is_reported(failures, self._context.intervals.destroy_alert)
        # No back-off, since the machine bills. The provider gate limits the rate of calls.
        return Change(attempt=(row.attempt, moved), events=(report,) if alert else ())

    # -------------------------------------------------------------------------------------------------------- settle

    def _settle(self, row: Leased, attempt: Attempt, *, image_refused: bool) -> Change:
        """Return the last charge, the release of the reservation and the job's next state, as one change."""
        now = self._context.clock.now()
        reason = end_reason(attempt, row.job)
        ended = step(attempt, AttemptEvent.ABSENT, now, reason=reason).attempt
        prices = moved_prices(self._context, self._inventory, attempt)
        charge = up_to(attempt, attempt.absent_at or now, prices)
        spent = attempt.charged_usd + charge.usd + charge.traffic_usd
        release = LedgerEntry(
            job_id=row.job.id,
            attempt_id=attempt.id,
            kind=LedgerKind.RELEASE,
            usd=max(attempt.reserved_usd - spent, attempt.reserved_usd * 0),
            note=reason.value,
        )
        job = after_attempt(row.job, ended, reason, ended.detail, now, image_refused=image_refused)
        events = (
            event(
                row.job,
                "attempt.ended",
                f"attempt {ended.number} ended: {reason.value}, {show(spent)}",
                attempt=ended,
                data={"reason": reason.value, "usd": str(spent)},
            ),
            *_replanned(row.job, job, ended),
            _job_event(job),
        )
        return Change(
            attempt=(row.attempt, ended),
            job=(row.job, job),
            charge=charge,
            ledger=(release,),
            events=events,
            observation=observed(row.job, ended),
            due_in_s=due_in_s(job, now),
        )

    async def _judge_host(self, ended: Attempt) -> None:
        """Block a host with a bad record before the job is quoted again. Hosts of the user are never blocked."""
        offer, store = ended.line.offer, self._context.store
        trust = offer.trust or self._context.provider_of(ended).caps.trust
        if trust == "own" or not weight(ended):
            return
        before = await store.ended_at_host(offer.host_key, tuple(WEIGHTS), within_s=MEMORY_S, limit=MAX_ATTEMPTS)
        block = judge_host((ended, *before), self._context.clock.now())
        if block is not None:
            await store.block_offer(offer.host_key, block.reason, for_s=block.for_s)

    async def _clean_up(self, attempt: Attempt) -> None:
        """Delete the heartbeats of an ended attempt, which would make every LIST longer. A failure does no harm."""
        try:
            for node in range(attempt.line.nodes):
                await self._context.blobs.delete(keys.heartbeat(attempt.id, node))
        except BlobsUnavailable:
            return


def _replanned(before: Job, after: Job, ended: Attempt) -> tuple[Event, ...]:
    """Return the event of a plan that changes after memory ran out."""
    if after.remedy is None or after.remedy == before.remedy:
        return ()
    changed = after.remedy
    data = {
        "micro_batch": changed.micro_batch,
        "gradient_checkpointing": changed.gradient_checkpointing,
        "tried": list(changed.failed_plans),
    }
    return (event(before, "job.replanned", adjustment_message(before, ended.line, changed), data=data),)


def _job_event(job: Job) -> Event:
    """Return the event of the job's next state."""
    return event(
        job,
        f"job.{job.state.value}",
        f"job {job.spec.name}: {job.state.value}" + (f" ({job.reason})" if job.reason else ""),
    )
