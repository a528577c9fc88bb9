"""Terminating attempts: destroy, until the cloud itself says absent and no launcher is left; then settle."""

from collections.abc import Sequence
from dataclasses import replace

from broker.billing.accrual import refused
from broker.controllers.base.batch import decide_batch
from broker.controllers.base.claims import Claims
from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import event, is_reported
from broker.controllers.billing.charges import moved_prices, surplus, up_to
from broker.controllers.billing.self_stop import self_stopped_by
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
"""What keeps an attempt from ending for longer, people must know."""
AGAIN_S = 1.0
"""How soon one that does not end yet is looked at again: sooner than this broker comes, so that others may."""


class Termination:
    """Claims attempts that are terminating. No edge gives up."""

    name = "termination"

    def __init__(
        self, context: ControllerContext, inventory: Inventory, launchers: CreatesInFlight, destroys: Destroys
    ) -> None:
        self._context = context
        self._inventory = inventory
        self._launchers = launchers
        self._destroys = destroys
        self._claims = Claims(context, Lane.TERMINATION)
        self.every_s = context.rhythm.poll_s

    async def step(self) -> bool:
        async with self._claims.leased(limit=self._context.rhythm.claim, turns=self._context.at_once) as leased:
            return bool(leased) and await self._end_all(leased)

    async def _end_all(self, leased: Sequence[Leased]) -> bool:
        context = self._context
        # What did not answer ends nothing in this round.
        unlisted = await self._inventory.refresh_all({one.attempt.line.offer.provider for one in leased})
        try:
            ends = await decide_batch(context, self.name, leased, lambda one: self._end(one, unlisted))
        except (GpubrokerError, TimeoutError):
            await context.store.release([], [one.attempt for one in leased], due_in_s=context.rhythm.look_s)
            raise
        decided = {one.attempt.id for one, _ in ends}
        if late := [one.attempt for one in leased if one.attempt.id not in decided]:
            await context.store.release([], late, due_in_s=context.rhythm.look_s)
        held = await context.store.apply([change for _, change in ends])
        for (one, change), ok in zip(ends, held, strict=True):
            if not ok:
                # Billing charged it meanwhile: settled at the next look, not when the lease lapses.
                await context.store.release([], [one.attempt], due_in_s=0.0)
            elif change.attempt and not change.attempt[1].live:
                await self._clean_up(one.attempt)
        return len(leased) == context.rhythm.claim and not unlisted

    async def _end(self, one: Leased, unlisted: set[str]) -> Change:
        attempt = one.attempt
        provider = attempt.line.offer.provider
        dead = await self._launchers.dead_since(attempt)
        absent_at = stood_until = None
        if provider not in unlisted:
            stood_until = None if attempt.booted_at else self._inventory.latest_possible_end(attempt)
            if dead is not None:
                absent_at = self._inventory.proven_absent_at(provider, attempt.name, dead, born_by=attempt.booted_at)
        if absent_at is None:
            standing = provider not in unlisted and self._inventory.is_listed(provider, attempt.name)
            again_s = 0.0 if provider in unlisted else min(AGAIN_S, self._context.rhythm.look_s)
            held = self._hold(one)
            return held or await self._destroy(one, standing=standing, launcher_dead=dead is not None, again_s=again_s)
        if refused(attempt):
            absent_at = attempt.create_sent_at or absent_at
        alone_until = self_stopped_by(self._context, self._inventory, attempt, one.job)
        absent_at = min(filter(None, (absent_at, stood_until, alone_until)))
        # Another broker may have charged it further, which had not seen it missing yet; nothing is taken back.
        absent_at = attempt.absent_at or max(absent_at, attempt.charged_to or absent_at)
        absent = replace(attempt, absent_at=absent_at)
        try:
            final = attempt.final or await read_final(self._context, attempt.id)
            told = await drain_reason_sent(self._context, attempt.id, final) if final else None
        except BlobsUnavailable:
            # The job goes on once its last word can be read; the money stops here.
            return Change(attempt=(attempt, absent), due_in_s=self._context.rhythm.look_s)
        absent = replace(absent, final=final, reason=told or attempt.reason)
        change = self._settle(one, absent, image_refused=await self._image_refused(attempt))
        if change.attempt is not None:
            await self._judge_host(change.attempt[1])
        return change

    async def _image_refused(self, attempt: Attempt) -> bool:
        """Whether an attempt before this one, which has, ended for the trainer's image as well, and none pulled it
        since. The first one's host is passed over for a while, so that the second opinion is another's.
        """
        if attempt.reason is not Reason.IMAGE:
            return False
        offer, store = attempt.line.offer, self._context.store
        await store.block_offer(offer.host_key, attempt.detail, for_s=self._context.rhythm.sold_out_s)
        others = [one for one in await store.attempts(attempt.job_id) if one.id != attempt.id]
        return any(one.reason is Reason.IMAGE for one in refused_in_a_row(others))

    def _hold(self, one: Leased) -> Change | None:
        """A failed job's machine is left alone for as long as was asked for, while it stands."""
        until, now = inspection_end(one.attempt, one.job), self._context.clock.now()
        seen = recorded_machines(one.attempt, self._inventory.listed(one.attempt.line.offer.provider, one.attempt.name))
        if until is None or now >= until or (seen and all(machine.state in TAKEN_AWAY for machine in seen)):
            return None
        wait_s = min(self._context.rhythm.look_s, (until - now).total_seconds())
        return Change(attempt=(one.attempt, one.attempt), due_in_s=wait_s)

    # ------------------------------------------------------------------------------------------------------- destroy

    async def _destroy(self, one: Leased, *, standing: bool, launcher_dead: bool, again_s: float) -> Change:
        """`again_s`: 0 where the cloud was not heard, for whoever comes next; who is cut off must not be first at a row
        each time that another one comes to it.
        """
        # An absence that was proven stays so for a broker without a proof of its own, until it is shown to stand.
        attempt = one.attempt
        if standing:
            attempt = replace(attempt, absent_at=None, handles=attempt.handles or self._handles(attempt))
        provider = attempt.line.offer.provider
        said = await gather_all(self._ask(provider, handle) for handle in self._handles(attempt))
        failed = next(filter(None, said), "")
        if not launcher_dead:
            await self._launchers.stop(attempt)
        if not failed and self._takes_long(one):
            failed = self._kept_by(attempt, standing=standing, launcher_dead=launcher_dead)
        charge = surplus(self._context, self._inventory, attempt)
        if not failed:
            return Change(attempt=(one.attempt, attempt), charge=charge, due_in_s=again_s)
        return replace(self._failed(one, attempt, failed), charge=charge, due_in_s=again_s)

    def _kept_by(self, attempt: Attempt, *, standing: bool, launcher_dead: bool) -> str:
        """What its end waits for, in one line."""
        name, provider = attempt.name, attempt.line.offer.provider
        if not launcher_dead:
            return (
                f"launcher {attempt.launched_by!r} of {name} at {provider} cannot be proven dead, so the machine may "
                "still come; end that launcher's process, or bring back its state folder; "
                f"if it is lost for good say so: gpubroker launcher lost {attempt.id}"
            )
        if trouble := self._inventory.trouble(provider):
            return f"{name} cannot be proven gone, and is charged: {provider} cannot be listed: {trouble}"
        if standing:
            return f"{provider} has taken the destroy of {name} and lists it still; if that lasts end it in its console"
        return ""

    async def _ask(self, provider: str, handle: Handle) -> str:
        """Why the cloud has not taken it, in one line; empty while nothing says so."""
        try:
            await self._destroys.ask(provider, handle)
        except Gone:
            return ""
        except ProviderError as e:
            return f"destroy of {handle.id} at {provider}: {e}"
        return ""

    def _takes_long(self, one: Leased) -> bool:
        since = inspection_end(one.attempt, one.job) or one.attempt.terminating_since or self._context.clock.now()
        return (self._context.clock.now() - since).total_seconds() > STUCK_S

    def _handles(self, attempt: Attempt) -> tuple[Handle, ...]:
        """The recorded machines and whatever else stands there under this name."""
        seen = self._inventory.listed(attempt.line.offer.provider, attempt.name)
        known = {h.id: h for h in attempt.handles}
        return tuple({**known, **{o.handle.id: o.handle for o in seen}}.values())

    def _failed(self, one: Leased, attempt: Attempt, message: str) -> Change:
        moved = step(attempt, AttemptEvent.DESTROY_ERROR, self._context.clock.now()).attempt
        failures = moved.destroy_failures + 1
        moved = replace(moved, destroy_failures=failures, detail=message)
        told = event(one.job, "attempt.destroy_failed", f"{message} ({failures} times)", attempt=moved)
        alert = is_reported(failures, self._context.rhythm.destroy_alert)
        # No back-off, since the machine bills: the cloud's gate keeps calls apart, and obeys what the cloud asks for.
        return Change(attempt=(one.attempt, moved), events=(told,) if alert else ())

    # -------------------------------------------------------------------------------------------------------- settle

    def _settle(self, one: Leased, attempt: Attempt, *, image_refused: bool) -> Change:
        """The last charge, the release of what is left, and the job's next state: one transaction."""
        now = self._context.clock.now()
        reason = end_reason(attempt, one.job)
        ended = step(attempt, AttemptEvent.ABSENT, now, reason=reason).attempt
        prices = moved_prices(self._context, self._inventory, attempt)
        charge = up_to(attempt, attempt.absent_at or now, prices)
        spent = attempt.charged_usd + charge.usd + charge.traffic_usd
        left = LedgerEntry(
            job_id=one.job.id,
            attempt_id=attempt.id,
            kind=LedgerKind.RELEASE,
            usd=max(attempt.reserved_usd - spent, attempt.reserved_usd * 0),
            note=reason.value,
        )
        job = after_attempt(one.job, ended, reason, ended.detail, now, image_refused=image_refused)
        events = (
            event(
                one.job,
                "attempt.ended",
                f"attempt {ended.number} ended: {reason.value}, {show(spent)}",
                attempt=ended,
                data={"reason": reason.value, "usd": str(spent)},
            ),
            *_replanned(one.job, job, ended),
            _job_event(job),
        )
        return Change(
            attempt=(one.attempt, ended),
            job=(one.job, job),
            charge=charge,
            ledger=(left,),
            events=events,
            observation=observed(one.job, ended),
            due_in_s=due_in_s(job, now),
        )

    async def _judge_host(self, ended: Attempt) -> None:
        """Before the job is quoted again: a host that did us wrong is left alone for a while. Never one of our own."""
        offer, store = ended.line.offer, self._context.store
        trust = offer.trust or self._context.provider_of(ended).caps.trust
        if trust == "own" or not weight(ended):
            return
        before = await store.ended_at_host(offer.host_key, tuple(WEIGHTS), within_s=MEMORY_S, limit=MAX_ATTEMPTS)
        block = judge_host((ended, *before), self._context.clock.now())
        if block is not None:
            await store.block_offer(offer.host_key, block.reason, for_s=block.for_s)

    async def _clean_up(self, attempt: Attempt) -> None:
        """Heartbeats of ended attempts would make every LIST longer. A leftover heartbeat does no harm."""
        try:
            for node in range(attempt.line.nodes):
                await self._context.blobs.delete(keys.beat(attempt.id, node))
        except BlobsUnavailable:
            return


def _replanned(before: Job, after: Job, ended: Attempt) -> tuple[Event, ...]:
    """Told when memory ran out and the next attempt is to need less."""
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
    """What the end of the attempt made of the job."""
    return event(
        job,
        f"job.{job.state.value}",
        f"job {job.spec.name}: {job.state.value}" + (f" ({job.reason})" if job.reason else ""),
    )
