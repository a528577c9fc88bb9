"""`ports.tenant_store.SpendingStore` on PostgreSQL."""

from decimal import Decimal

from broker.domain.ids import AttemptId, JobId
from broker.domain.money import LedgerCategory
from broker.domain.spending import Paid, PaidAttempt, PaidJob, Slice, SpendWindow
from broker.store.postgres import row_codec
from broker.store.postgres.base import PostgresPart


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


def _attempt(row: row_codec.Record) -> PaidAttempt:
    dearest = row["dearest_usd"]
    return PaidAttempt(
        attempt=row_codec.attempt(row),
        compute_usd=row["compute_usd"],
        dearest_usd=Decimal(dearest) if dearest is not None else None,
    )
