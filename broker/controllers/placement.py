"""Queued jobs: quote every offer, choose, and admit an attempt with its reservation, in one transaction."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from functools import partial

from broker.controllers.context import Context
from broker.controllers.each import each
from broker.controllers.events import event
from broker.controllers.forsale import Offers
from broker.decide.billing import least_usd, reservation
from broker.decide.lifecycle import JobEvent, next_job_state
from broker.decide.placement import Queue, choose
from broker.decide.quote import quote
from broker.decide.recovery import furthest_first, workload_left
from broker.domain.ids import JobId, attempt_id, instance_name
from broker.domain.job import Attempt, Job, JobState, LedgerEntry, LedgerKind
from broker.domain.offer import Quote, QuoteLine
from broker.ports import Change
from trainer.contract import keys

Troubles = Callable[[], Mapping[str, str]]
_NUMBER = re.compile(r"[\d.,]+")


class Placement:
    """Claims jobs that are queued, or recovering with their back-off over."""

    name = "placement"

    def __init__(self, context: Context, offers: Offers, troubles: Troubles = dict) -> None:
        """`troubles`: why a provider does not sell, by its name."""
        self._context = context
        self._offers, self._troubles = offers, troubles
        self.every_s = context.rhythm.poll_s

    async def step(self) -> bool:
        context = self._context
        jobs = await context.store.claim_jobs(
            (JobState.QUEUED, JobState.RECOVERING),
            owner=context.owner,
            lease_s=context.rhythm.lease_s,
            limit=context.rhythm.claim,
        )
        if not jobs:
            await context.store.wait("jobs", self.every_s)
            return True  # the wait was the pause
        excluded = await context.store.blocked_offers()
        decided = await each(context, self.name, jobs, lambda job: self._decide(job, excluded))
        await context.store.apply([change for _, change in decided])
        return True

    async def _decide(self, job: Job, excluded: Mapping[str, str]) -> Change:
        if job.stop_requested:
            stopped = replace(
                job,
                state=next_job_state(job.state, JobEvent.STOP),
                reason="stopped before it ran",
                finished_at=self._context.clock.now(),
            )
            return Change(job=(job, stopped), events=(event(job, "job.cancelled", "cancelled"),))
        if job.state is JobState.RECOVERING:
            queued = replace(job, state=next_job_state(job.state, JobEvent.BACK_OFF_OVER), due_at=None)
            return Change(job=(job, queued))
        return await self._place(job, excluded)

    async def _place(self, job: Job, excluded: Mapping[str, str]) -> Change:
        context, cap_left = self._context, reservation(job)
        resume_from = await self._resume_from(job)
        made = quote(
            job.spec,
            workload_left(job, resume_from),
            self._offers(),
            now=context.clock.now(),
            local_files=context.blobs.local or _local_model(job),
            scoped_store=context.blobs.scopes,
            spent=job.spent_usd,
            cap_left=cap_left,
            excluded=excluded,
            caps={name: p.caps for name, p in context.providers.items()},
        )
        choice = choose(made, cap_left=cap_left, attempt_number=job.attempts + 1, least=partial(self._least_usd, job))
        if choice.line is None:
            return self._wait(job, choice.reason, capped=choice.queue is Queue.CAPPED)
        return self._admit(job, choice.line, choice.reason, made, resume_from)

    def _least_usd(self, job: Job, line: QuoteLine) -> Decimal:
        context = self._context
        caps, every_s = context.providers[line.offer.provider].caps, job.spec.checkpoint.every_s
        return least_usd(line, caps, every_s, tick_s=context.rhythm.billing_s, drain_s=context.limits.drain_s)

    def _wait(self, job: Job, reason: str, *, capped: bool) -> Change:
        if capped:
            state = next_job_state(job.state, JobEvent.CANNOT_FINISH)
            rest = replace(job, state=state, reason=reason, finished_at=self._context.clock.now())
            return Change(job=(job, rest), events=(event(job, "job.capped", reason),))
        reason = "; ".join([reason, *self._silent(job)])
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
            reserved_usd=reservation(job),
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
            ledger=(held,),
            events=(event(job, "attempt.intended", reason, attempt=attempt, data=data),),
        )

    async def _resume_from(self, job: Job) -> tuple[str, ...]:
        """Committed manifests of this job (or of the one it starts from), the furthest step first."""
        sources = [job.id] if job.attempts else []
        if job.spec.init_from:
            sources.append(JobId(job.spec.init_from.removeprefix("job/")))
        found: list[str] = []
        for source in sources:
            listed = await self._context.blobs.list(keys.checkpoints(source))
            found += furthest_first([blob.key for blob in listed])
        return tuple(found)


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
