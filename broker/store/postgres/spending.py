"""`ports.tenant_store.SpendingStore` on PostgreSQL."""

from collections.abc import Sequence
from decimal import Decimal

from pydantic import TypeAdapter

from broker.domain.ids import AttemptId, JobId
from broker.domain.money import LedgerCategory
from broker.domain.spending import FinishedJob, Paid, PaidAttempt, PaidJob, Slice, SpendWindow
from broker.domain.workload import MemoryNeed
from broker.store.postgres import row_codec
from broker.store.postgres.base import PostgresPart

_MEMORY: TypeAdapter[MemoryNeed | None] = TypeAdapter(MemoryNeed | None)


class PostgresSpending(PostgresPart):
    async def paid(self, window: SpendWindow) -> Paid:
        """Read slices, attempts and jobs in three transactions; the next report shows a charge made in between."""
        records = await self._pool.read("paid_slices", window.since, window.until, window.zone)
        slices = [
            Slice(
                job_id=JobId(row["job_id"]),
                attempt_id=AttemptId(row["attempt_id"]) if row["attempt_id"] else None,
                category=LedgerCategory(row["category"]),
                day=row["day"],
                usd=row["usd"],
            )
            for row in records
        ]
        attempts = await self._pool.read("paid_attempts", sorted({s.attempt_id for s in slices if s.attempt_id}))
        jobs = await self._pool.read("paid_jobs", sorted({s.job_id for s in slices}))
        return Paid(
            slices=slices,
            attempts={AttemptId(row["id"]): _attempt(row) for row in attempts},
            jobs={JobId(row["id"]): PaidJob(name=row["name"], team=row["team"], owner=row["owner"]) for row in jobs},
        )

    async def finished(self, window: SpendWindow, *, limit: int) -> Sequence[FinishedJob]:
        rows = await self._pool.read("finished_jobs", window.since, window.until, limit)
        return [_finished(row) for row in rows]


def _finished(row: row_codec.Record) -> FinishedJob:
    values = dict(row)
    memory, peak = values.pop("memory"), values.pop("peak_bytes")
    return FinishedJob(
        memory=None if memory is None else _MEMORY.validate_json(memory),
        peak_bytes=None if peak is None else int(peak),
        **values,
    )


def _attempt(row: row_codec.Record) -> PaidAttempt:
    dearest = row["dearest_usd"]
    return PaidAttempt(
        attempt=row_codec.attempt(row),
        compute_usd=row["compute_usd"],
        dearest_usd=Decimal(dearest) if dearest is not None else None,
    )
