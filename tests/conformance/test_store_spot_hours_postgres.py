"""The queries of spot machines and markets, every 10 minutes, read only their window by indexes."""

from typing import Any

from broker.store.postgres.pool import QUERIES
from broker.store.postgres.store import PostgresStore


async def test_spot_machines_have_an_index(postgres_dsn: str, raw: Any) -> None:
    await (await PostgresStore.connect(postgres_dsn, pool_size=1)).close()
    await raw.execute("SET enable_seqscan = off")
    plan = await raw.fetch(f"EXPLAIN {QUERIES['spot_hours']}".replace("$1", "2592000"))
    assert "attempts_spot" in " ".join(row[0] for row in plan)


FILL = """
INSERT INTO offer_history (accelerator, bucket, provider, merged, document)
SELECT 'gpu' || g, d * 288, p, true, ''
FROM generate_series(1, 30) g, generate_series(0, 89) d, unnest(ARRAY['aws', 'runpod', 'vast', 'lambda']) p;
INSERT INTO offer_refusals (provider, cloud, region, accelerator, gpus, spot, bucket)
SELECT 'vast', 'vast', 'r' || n % 7, 'gpu' || n % 30, 1, true, n FROM generate_series(1, 25920) n;
ANALYZE offer_history; ANALYZE offer_refusals
"""


async def test_the_evidence_of_spot_markets_is_read_by_indexes_at_size(postgres_dsn: str, raw: Any) -> None:
    await (await PostgresStore.connect(postgres_dsn, pool_size=1)).close()
    await raw.execute(FILL)
    query = QUERIES["spot_evidence"].replace("$1", "'{\"\",gpu7,gpu8}'").replace("$2", "21888")
    plan = "\n".join(row[0] for row in await raw.fetch(f"EXPLAIN {query}"))
    assert "offer_history_pkey" in plan
    assert "offer_refusals_pkey" in plan
    assert "Seq Scan on offer" not in plan
    await raw.execute("SET enable_seqscan = off")  # the table of attempts is empty
    assert "attempts_spot" in "\n".join(row[0] for row in await raw.fetch(f"EXPLAIN {query}"))
