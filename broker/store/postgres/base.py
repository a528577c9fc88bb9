"""Base class of the parts of the PostgreSQL store, which `PostgresTenant` combines."""

from collections.abc import Sequence

from broker.domain.job import Event
from broker.domain.tenancy import AuditEntry, Tenant
from broker.store.postgres import row_codec
from broker.store.postgres.apply import notify, send_events
from broker.store.postgres.pool import QUERIES, Connection, Pool, columns


class PostgresPart:
    """Part of the store that reads and writes the rows of `tenant` through `pool`."""

    def __init__(self, pool: Pool, tenant: Tenant) -> None:
        self._pool = pool
        self._tenant = tenant

    async def _write_event(self, connection: Connection, event: Event, job: row_codec.Record) -> None:
        """Write an event of a locked job, whose event counter was already increased."""
        await send_events(connection, [row_codec.written_event(event, job["event_seq"])])
        await notify(connection, {"jobs": None, f"job/{job['id']}": None})


async def write_audit(connection: Connection, entries: Sequence[AuditEntry]) -> None:
    """Write audit entries in the transaction of the audited change."""
    if entries:
        await connection.execute(QUERIES["write_audit"], *columns(map(row_codec.audited, entries)))
