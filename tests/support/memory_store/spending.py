"""`ports.spending.SpendingStore` in memory."""

from collections import defaultdict
from datetime import date
from decimal import Decimal
from zoneinfo import ZoneInfo

from broker.domain.ids import AttemptId, JobId
from broker.domain.money import ZERO, LedgerCategory, LedgerEntry
from broker.domain.spending import Paid, PaidAttempt, PaidJob, Slice, SpendWindow
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
