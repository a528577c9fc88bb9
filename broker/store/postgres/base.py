"""What each concern's part of the PostgreSQL store is built on: see `PostgresTenant`."""

from collections.abc import Sequence

from broker.domain.job import Event
from broker.domain.tenancy import AuditEntry, Tenant
from broker.store.postgres import row_codec as rows
from broker.store.postgres.apply import notify, send_events
from broker.store.postgres.pool import QUERIES, Connection, Pool, columns


class PostgresPart:
    """The rows as `tenant` sees them through `pool`."""

    def __init__(self, pool: Pool, tenant: Tenant) -> None:
        self._pool = pool
        self._tenant = tenant

    async def _tell(self, connection: Connection, event: Event, job: rows.Record) -> None:
        """Writes an event of a locked job whose counter was raised for it."""
        await send_events(connection, [rows.written_event(event, job["event_seq"])])
        await notify(connection, {"jobs": None, f"job/{job['id']}": None})


async def write_audit(connection: Connection, entries: Sequence[AuditEntry]) -> None:
    """In the transaction of what they tell of."""
    if entries:
        await connection.execute(QUERIES["write_audit"], *columns(map(rows.audited, entries)))
