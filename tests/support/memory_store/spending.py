"""`ports.spending.SpendingStore` in memory."""

from collections import defaultdict
from collections.abc import Sequence
from datetime import date, datetime
from decimal import Decimal
from zoneinfo import ZoneInfo

from broker.domain.ids import AttemptId, JobId
from broker.domain.job import Attempt, Job, JobState, Reason
from broker.domain.money import ZERO, LedgerCategory, LedgerEntry
from broker.domain.spending import FinishedJob, Paid, PaidAttempt, PaidJob, Slice, SpendWindow
from tests.support.memory_store.policy_tables import SPENT
from tests.support.memory_store.state import MemoryPart


class MemorySpending(MemoryPart):
    async def paid(self, window: SpendWindow) -> Paid:
        zone, state = ZoneInfo(window.zone), self._state
        sums: dict[tuple[date, JobId, AttemptId | None, LedgerCategory], Decimal] = defaultdict(Decimal)
        for at, entry in state.policies.booked:
            if window.since <= at < window.until and entry.kind in SPENT and self._visible(entry.job_id):
                sums[at.astimezone(zone).date(), entry.job_id, entry.attempt_id, entry.category] += entry.usd
        ordered = sorted(sums.items(), key=lambda item: (item[0][0], item[0][1], item[0][2] or "", item[0][3]))
        slices = [
            Slice(job_id=job_id, attempt_id=attempt_id, category=category, day=day, usd=usd)
            for (day, job_id, attempt_id, category), usd in ordered
        ]
        return Paid(
            slices=slices,
            attempts={own: self._attempt(own) for own in {s.attempt_id for s in slices} if own is not None},
            jobs={own: self._job(own) for own in {s.job_id for s in slices}},
        )

    async def finished(self, window: SpendWindow, *, limit: int) -> Sequence[FinishedJob]:
        state = self._state
        latest = sorted((_ended(state.jobs[own].value), own) for own in state.by_state[JobState.SUCCEEDED])
        jobs: list[FinishedJob] = []
        for ended_at, own in reversed(latest):
            attempts = [state.attempts[attempt].value for attempt in state.of_job[own]]
            quoted = [number for number, attempt in enumerate(attempts) if attempt.first_beat_at is not None]
            if window.since <= ended_at < window.until and self._visible(own) and quoted:
                jobs.append(_finished(state.jobs[own].value, attempts[quoted[0] :]))
        return jobs[:limit]

    def _attempt(self, own: AttemptId) -> PaidAttempt:
        attempt = self._state.attempts[own].value
        told = (e for e in self._state.events_of[attempt.job_id] if e.attempt_id == own)
        dearest = next((e.data.get("dearest") for e in told if e.kind == "attempt.planned"), None)
        return PaidAttempt(
            attempt=attempt,
            compute_usd=sum((e.usd for e in self._state.ledger[attempt.job_id] if _compute(e, own)), ZERO),
            dearest_usd=Decimal(dearest["usd_p50"]) if dearest else None,
        )

    def _job(self, own: JobId) -> PaidJob:
        job = self._state.jobs[own].value
        return PaidJob(name=job.spec.name, team=job.team, owner=job.owner)


def _compute(entry: LedgerEntry, own: AttemptId) -> bool:
    return entry.attempt_id == own and entry.kind in SPENT and entry.category is LedgerCategory.COMPUTE


def _ended(job: Job) -> datetime:
    assert job.finished_at is not None
    return job.finished_at


def _finished(job: Job, attempts: Sequence[Attempt]) -> FinishedJob:
    """Return the first attempt's quote with the results of all of them."""
    first, line, workload = attempts[0], attempts[0].line, job.workload
    last = first.final or first.beat
    worked = last is not None and last.step > (last.resumed_from or 0)
    ends = [end for end in (attempt.terminating_since or attempt.ended_at for attempt in attempts) if end]
    hours = (max(ends) - first.create_sent_at).total_seconds() / 3600 if ends and first.create_sent_at else None
    host = line.offer.gpus > 0 and first.final is not None and first.final.ran_out == "host"
    return FinishedJob(
        accelerator=line.offer.accelerator, gpus=line.offer.gpus, simulated=line.offer.simulated,
        emulated=line.offer.emulated_on is not None, family=workload.shape.family if workload.shape else "",
        method=workload.method, task=workload.task, tier=line.tier, usd_p50=line.usd_p50, usd_p90=line.usd_p90,
        bucket_usd=line.costs.storage + line.costs.requests if line.costs else ZERO, hours_p50=line.hours_p50,
        hours_p90=line.hours_p90, memory=line.memory, spent_usd=sum((a.charged_usd for a in attempts), ZERO),
        hours=hours, peak_bytes=last.peak_memory_bytes if worked and last else None,
        out_of_memory=first.reason is Reason.OOM and not host,
    )  # fmt: skip
