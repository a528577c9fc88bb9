"""Queued jobs: quote every offer, choose, and admit an attempt with its reservation, in one transaction."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from functools import partial

from broker.billing.caps import min_budget_usd, reservation, reserved
from broker.billing.time_limits import out_of_time
from broker.controllers.base.batch import decide_batch
from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import event
from broker.controllers.market.offers_by_id import Offers
from broker.controllers.observation.inventory import Inventory
from broker.controllers.observation.restored_attempts import RestoredAttempts
from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import JobId, attempt_id, instance_name
from broker.domain.job import Attempt, Job, JobState, LedgerEntry, LedgerKind, Reason
from broker.domain.offer import Quote, QuoteLine
from broker.estimator.planning.corrections import NO_CORRECTIONS, LearnedCorrections
from broker.lifecycle.account_refusals import told_refusals
from broker.lifecycle.recovery import furthest_first, lasting, workload_left
from broker.lifecycle.state_machine import JobEvent, next_job_state
from broker.policy.budgets import Applied, Hold, Refusal, admission, entry, gpu_room, judge
from broker.ports import Change
from broker.ports.policies import JobOwner
from broker.quote.decision_record import packed
from broker.quote.engine import quote
from broker.quote.placement import Queue, choose
from trainer.contract import object_keys as keys

Troubles = Callable[[], Mapping[str, str]]
_NUMBER = re.compile(r"[\d.,]+")
_ENDS: Mapping[Reason | None, tuple[JobEvent, str, str]] = {
    Reason.STOPPED: (JobEvent.STOP, "job.cancelled", "stopped after the backup that this database comes from"),
    Reason.CAPPED: (JobEvent.CANNOT_FINISH, "job.capped", "capped after the backup that this database comes from"),
}
"""How a job ends whose last attempt this database does not know."""


@dataclass(frozen=True, kw_only=True)
class _PlacementRound:
    """What all jobs of one claim are judged by."""

    excluded: Mapping[str, str]
    now: datetime
    applied: Mapping[JobOwner, Sequence[Applied]]

    def of(self, job: Job) -> tuple[Sequence[Applied], datetime]:
        """The policies that cover a job, as they stood at the moment that comes with them."""
        return self.applied[job.team, job.owner], self.now


class Placement:
    """Claims jobs that are queued, awaiting approval, or recovering with their back-off over."""

    name = "placement"

    def __init__(
        self,
        context: ControllerContext,
        inventory: Inventory,
        offers: Offers,
        troubles: Troubles = dict,
        learned: LearnedCorrections = lambda: NO_CORRECTIONS,
    ) -> None:
        """`troubles`: why a provider does not sell, by its name. `learned`: what own runs have shown."""
        self._context, self._inventory = context, inventory
        self._offers, self._troubles, self._learned = offers, troubles, learned
        self._restored, self._started = RestoredAttempts(context, inventory), False
        self.every_s = context.rhythm.poll_s

    async def step(self) -> bool:
        context = self._context
        self._restored.begin()
        if not self._started:
            self._started = True
            await self._restored.start()
        jobs = await context.store.claim_jobs(
            (JobState.QUEUED, JobState.RECOVERING, JobState.AWAITING_APPROVAL),
            owner=context.owner,
            lease_s=context.rhythm.lease_s,
            limit=context.rhythm.claim,
        )
        if not jobs:
            await context.store.wait("jobs", self.every_s)
            return True  # the wait was the pause
        now, applied = await context.store.applied(list({(job.team, job.owner) for job in jobs}))
        excluded = {**await context.store.blocked_offers(), **self._inventory.refusals}
        seen = _PlacementRound(excluded=excluded, now=now, applied=applied)
        decided = await decide_batch(context, self.name, jobs, lambda job: self._decide(job, seen))
        held = await context.store.apply([change for _, change in decided])
        # Others took the room meanwhile, in this round or elsewhere: the next look says so.
        missed = [job for (job, _), ok in zip(decided, held, strict=True) if not ok]
        if missed:
            await context.store.release(missed, [], due_in_s=0.0)
        return True

    async def _decide(self, job: Job, seen: "_PlacementRound") -> Change:
        if job.stop_requested:
            stopped = replace(
                job,
                state=next_job_state(job.state, JobEvent.STOP),
                reason="stopped before it ran",
                finished_at=self._context.clock.now(),
            )
            return Change(job=(job, stopped), events=(event(job, "job.cancelled", "cancelled"),))
        if job.state is JobState.RECOVERING:
            queued = replace(job, state=next_job_state(job.state, JobEvent.BACK_OFF_OVER), reason="", due_at=None)
            return Change(job=(job, queued))
        if (late := out_of_time(job, self._context.clock.now(), needed_s=self._lead_s)) is not None:
            return self._too_late(job, late)
        first = judge(entry(job.cap_usd, job.approved_usd), *seen.of(job))
        if job.state is JobState.AWAITING_APPROVAL:
            return self._await(job, first)
        if first is not None:
            return self._refused(job, first)
        if why := self._context.forbidden(job.spec):
            return self._hold(job, why)
        try:
            return await self._place(job, seen)
        except BlobsUnavailable as e:
            return self._hold(job, f"the blob store cannot be read, so nothing is known of earlier attempts: {e}")

    @property
    def _lead_s(self) -> float:
        """A machine that has less time is drained as soon as it is bought."""
        return self._context.tempo.lead_s

    def _too_late(self, job: Job, reason: str) -> Change:
        state = next_job_state(job.state, JobEvent.OUT_OF_TIME)
        rest = replace(job, state=state, reason=reason, finished_at=self._context.clock.now())
        return Change(job=(job, rest), events=(event(job, "job.failed", reason),))

    def _await(self, job: Job, refusal: Refusal | None) -> Change:
        """Nobody has answered yet; the policy may have changed meanwhile."""
        if refusal is not None and refusal.hold is Hold.APPROVAL:
            return Change(job=(job, replace(job, reason=refusal.reason)), due_in_s=self._context.rhythm.replace_s)
        queued = replace(job, state=next_job_state(job.state, JobEvent.APPROVED), reason="", due_at=None)
        told = event(job, "job.approval_waived", "approval is not needed any more: the policy has changed")
        return Change(job=(job, queued), events=(told,))

    def _refused(self, job: Job, refusal: Refusal) -> Change:
        """A policy says no, or asks people."""
        if refusal.hold is not Hold.APPROVAL:
            return self._wait(job, refusal.reason, capped=False)
        waiting = replace(job, state=next_job_state(job.state, JobEvent.NEEDS_APPROVAL), reason=refusal.reason)
        data = {"policy": refusal.policy, "cap_usd": str(job.cap_usd)}
        told = event(job, "job.awaiting_approval", refusal.reason, data=data)
        return Change(job=(job, waiting), events=(told,), due_in_s=self._context.rhythm.replace_s)

    async def _place(self, job: Job, seen: "_PlacementRound") -> Change:
        context, cap_left = self._context, reservation(job)
        resume_from = await self._resume_from(job)
        applied, now = seen.of(job)
        room = gpu_room(applied)
        nodes, offers = job.spec.resources.nodes, self._offers()
        if room is not None:
            offers = [one for one in offers if one.gpus * nodes <= room[0]]
        made = quote(
            job.spec,
            workload_left(job, resume_from),
            offers,
            now=context.clock.now(),
            local_files=context.blobs.local or _local_model(job),
            scoped_store=context.blobs.scopes,
            spent=job.spent_usd,
            cap_left=cap_left,
            excluded=seen.excluded,
            caps={name: p.caps for name, p in context.providers.items()},
            machine_s=job.machine_s,
            lead_s=self._lead_s,
            storage_usd_per_gib_month=context.costs.storage_usd_per_gib_month,
            learned=self._learned(),
        )
        choice = choose(made, cap_left=cap_left, attempt_number=job.attempts + 1, least=partial(self._least_usd, job))
        if choice.line is None:
            refusals = told_refusals(seen.excluded, job.spec.resources.providers)
            if choice.queue is Queue.WAIT:
                choice = replace(choice, reason="; ".join([*refusals, choice.reason]))
            if room is not None:  # what no policy lets through speaks of the cap no more than of the market
                return self._wait(job, f"{choice.reason}; {room[1]}", capped=False)
            return self._wait(job, choice.reason, capped=choice.queue is Queue.CAPPED)
        if numbers := await self._restored.attempt_numbers_used(job, resume_from):
            return await self._pass(job, numbers)
        change = self._admit(job, choice.line, choice.reason, made, resume_from)
        if change.admit is not None:
            refusal = judge(admission(change.admit, job.cap_usd, job.approved_usd), applied, now)
            if refusal is not None:
                return self._refused(job, refusal)
        return change

    async def _pass(self, job: Job, numbers: Sequence[int]) -> Change:
        """These were issued before a backup was restored: once their machines are gone the job goes on behind them."""
        context = self._context
        if why := await self._restored.blocking_machine(job, numbers):
            return self._hold(job, why)
        last = numbers[-1]
        ended_for = _ENDS.get(await self._restored.ended_for(attempt_id(job.id, last)))
        passed = replace(job, attempts=last, reason="")
        if ended_for is None:
            words = f"attempts up to {last} were made after the backup that this database comes from; another follows"
            return Change(job=(job, passed), events=(event(job, "job.restored", words),))
        ends, kind, words = ended_for
        state = next_job_state(job.state, ends)
        rest = replace(passed, state=state, reason=words, finished_at=context.clock.now())
        return Change(job=(job, rest), events=(event(job, kind, words),))

    def _least_usd(self, job: Job, line: QuoteLine) -> Decimal:
        context = self._context
        caps, every_s = context.providers[line.offer.provider].caps, job.spec.checkpoint.least_s
        return min_budget_usd(line, caps, every_s, context.tempo)

    def _reserved(self, job: Job, line: QuoteLine) -> Decimal:
        context = self._context
        caps = context.providers[line.offer.provider].caps
        return reserved(job, line, caps, context.tempo)

    def _wait(self, job: Job, reason: str, *, capped: bool) -> Change:
        if capped:
            state = next_job_state(job.state, JobEvent.CANNOT_FINISH)
            rest = replace(job, state=state, reason=reason, finished_at=self._context.clock.now())
            return Change(job=(job, rest), events=(event(job, "job.capped", reason),))
        return self._hold(job, "; ".join([reason, *self._silent(job)]))

    def _hold(self, job: Job, reason: str) -> Change:
        """It stays where it is and is looked at again; people hear why, once."""
        events = () if _same_but_for_numbers(reason, job.reason) else (event(job, "job.waiting", reason),)
        return Change(job=(job, replace(job, reason=reason)), events=events, due_in_s=self._context.rhythm.replace_s)

    def _silent(self, job: Job) -> list[str]:
        """What the providers that the job may use, and that sell nothing, have said."""
        asked = job.spec.resources.providers
        return [f"{name}: {why}" for name, why in self._troubles().items() if not asked or name in asked]

    def _admit(self, job: Job, line: QuoteLine, reason: str, made: Quote, resume_from: tuple[str, ...]) -> Change:
        number = job.attempts + 1
        new = attempt_id(job.id, number)
        attempt = Attempt(
            id=new,
            job_id=job.id,
            number=number,
            name=instance_name(self._context.installation, new),
            line=line,
            created_at=self._context.clock.now(),
            reserved_usd=self._reserved(job, line),
            resume_from=resume_from,
        )
        active = replace(job, state=next_job_state(job.state, JobEvent.INTENDED), attempts=number, reason="")
        offer = line.offer
        held = LedgerEntry(
            job_id=job.id, attempt_id=new, kind=LedgerKind.RESERVATION, usd=attempt.reserved_usd, note=offer.id
        )
        data = {"number": number, "offer": offer.id, "simulated": offer.simulated, "offers": _summary(made)}
        data |= _dearest(made)
        return Change(
            job=(job, active),
            admit=attempt,
            decision=packed(made),
            ledger=(held,),
            events=(event(job, "attempt.intended", reason, attempt=attempt, data=data),),
        )

    async def _resume_from(self, job: Job) -> tuple[str, ...]:
        """Committed manifests of this job (or of the one it starts from), the furthest step first."""
        found = await self._manifests(job.id) if job.attempts else ()
        if (origin := job.spec.origin) is not None:
            theirs = await self._manifests(origin)
            alone = job.spec.resources.nodes == 1
            found += theirs if alone else lasting(theirs, await self._context.store.attempts(origin))
        return found

    async def _manifests(self, job: JobId) -> tuple[str, ...]:
        return furthest_first([blob.key for blob in await self._context.blobs.list(keys.checkpoints(job))])


def _same_but_for_numbers(one: str, other: str) -> bool:
    """Prices and counts move at every look; people hear of a wait again only when its cause changes."""
    return _NUMBER.sub("", one) == _NUMBER.sub("", other)


def _local_model(job: Job) -> bool:
    """True when the model is a folder of this machine."""
    return job.spec.train is not None and job.spec.train.model.startswith(("/", "./", "../", "~"))


def _summary(made: Quote) -> list[dict[str, object]]:
    """The best three, for the record of why this one was chosen."""
    return [
        {"offer": line.offer.id, "usd_p50": str(line.usd_p50), "usd_per_hour": str(line.offer.usd_per_hour)}
        for line in made.lines[:3]
        if line.usd_p50 is not None
    ]


def _dearest(made: Quote) -> dict[str, object]:
    """The last of the kept lines: what the choice is compared with when people ask what it saved."""
    line = made.lines[made.kept - 1] if made.kept else None
    if line is None or line.usd_p50 is None:
        return {}
    return {"dearest": {"offer": line.offer.id, "usd_p50": str(line.usd_p50)}}
