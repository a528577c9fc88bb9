"""The query of spot hours, every 10 minutes, reads only the spot machines of its window by an index."""

from typing import Any

from broker.store.postgres.pool import QUERIES
from broker.store.postgres.store import PostgresStore


async def test_spot_machines_have_an_index(postgres_dsn: str, raw: Any) -> None:
    await (await PostgresStore.connect(postgres_dsn, pool_size=1)).close()
    await raw.execute("SET enable_seqscan = off")
    plan = await raw.fetch(f"EXPLAIN {QUERIES['spot_hours']}".replace("$1", "2592000"))
    assert "attempts_spot" in " ".join(row[0] for row in plan)
