"""Queries of every round read live attempts by an index, and not the attempts and jobs of the past."""

from typing import Any

from broker.store.postgres.pool import QUERIES
from broker.store.postgres.store import PostgresStore
from tests.conformance.samples import running

PAST, LIVE = 5_000, 100
"""Numbers of ended and of live attempts: a scan of all of them would cost more than an index."""
COPIES = """
INSERT INTO jobs (id, team, owner, spec, workload, created_at, state, reason, attempts, retries_used, spent_usd,
    cap_usd, stop_requested, body_sha256, due_at, event_seq)
SELECT n::text, team, owner, spec, workload, created_at, 'active', '', 1, 0, 0, 1, false, '', due_at, 0
FROM jobs, generate_series(1, $1) AS n;
INSERT INTO attempts (id, job_id, number, name, line, created_at, reserved_usd, resume_from, state, reason, detail,
    create_sent_at, launched_by, handles, destroy_failures, ended_at, charged_usd, stop_requested, due_at)
SELECT n::text, n::text, 1, n::text, line, created_at, 0, '[]', CASE WHEN n > $2 THEN 'ended' ELSE 'training' END,
    'lost', '', created_at, '', '[]', 0, CASE WHEN n > $2 THEN created_at END, 0, false, due_at
FROM attempts, generate_series(1, $1) AS n;
ANALYZE jobs; ANALYZE attempts
"""
INDEX_OF = {"live_versions": "attempts_", "live_attempts": "attempts_pkey", "claim_reviews": "attempts_reviewed"}
CALLS = {
    "live_versions": (),
    "live_attempts": ("'{1,2,3}'",),
    "claim_reviews": ("'a'", "'{simulated}'", "50", "180", "180"),
}


async def test_no_round_scans_the_attempts_of_the_past(postgres_dsn: str, raw: Any) -> None:
    store = await PostgresStore.connect(postgres_dsn, pool_size=1)
    await running(store)
    await store.close()
    await raw.execute(COPIES.replace("$1", str(PAST)).replace("$2", str(LIVE)))
    for name, index in INDEX_OF.items():
        query = QUERIES[name]
        for place, value in enumerate(CALLS[name], start=1):
            query = query.replace(f"${place}", value)
        plan = "\n".join(row[0] for row in await raw.fetch(f"EXPLAIN {query}"))
        assert index in plan
        assert "Seq Scan on attempts" not in plan, plan
