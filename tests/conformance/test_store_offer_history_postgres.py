"""Reads and merges of the offer history use indexes at the size of a quarter year."""

from typing import Any

from broker.store.postgres.pool import QUERIES
from broker.store.postgres.store import PostgresStore

FILL = """
INSERT INTO offer_history (accelerator, bucket, provider, merged, document)
SELECT 'gpu' || g, d * 288, p, true, ''
FROM generate_series(1, 30) g, generate_series(0, 89) d, unnest(ARRAY['aws', 'runpod', 'vast', 'lambda']) p
"""

REFUSE = """
INSERT INTO offer_refusals (provider, cloud, region, accelerator, gpus, spot, bucket)
SELECT 'vast', 'vast', 'r' || n % 7, 'gpu' || n % 30, 1, true, n FROM generate_series(1, 25920) n
"""


async def plan(raw: Any, name: str, *values: str) -> str:
    statement = QUERIES[name]
    for number, value in enumerate(values, start=1):
        statement = statement.replace(f"${number}", value)
    return "\n".join(row[0] for row in await raw.fetch(f"EXPLAIN {statement}"))


async def test_offer_history_is_read_by_index_at_size(postgres_dsn: str, raw: Any) -> None:
    await (await PostgresStore.connect(postgres_dsn, pool_size=1)).close()
    await raw.execute(FILL)
    await raw.execute(REFUSE)
    await raw.execute("ANALYZE offer_history; ANALYZE offer_refusals")
    week = await plan(raw, "offer_history", "'{\"\",gpu7}'", "23904", "25920")
    assert "offer_history_pkey" in week
    assert "Seq Scan on offer_history" not in week
    assert "Seq Scan on offer_history" not in await plan(raw, "recorded_accelerators")
    assert "offer_history_samples" in await plan(raw, "take_samples", "25920")
    refused = await plan(raw, "offer_refusals", "'{gpu7}'", "23904", "25920")
    assert "offer_refusals_pkey" in refused
    assert "Seq Scan" not in refused
