"""Lists of jobs and audit entries at size: the API's role reads their newest rows by indexes, never whole tables."""

from typing import Any

import pytest

from broker.store.postgres.pool import QUERIES
from broker.store.postgres.store import API_ROLE, PostgresStore

FILL = """
INSERT INTO jobs (id, team, owner, spec, workload, created_at, state, reason, attempts, retries_used, spent_usd,
    cap_usd, stop_requested, body_sha256, due_at, event_seq)
SELECT 'job' || n, 'default', CASE WHEN n % 500 = 0 THEN 'grace' ELSE 'ada' END,
    jsonb_build_object('labels', CASE WHEN n % 500 = 0 THEN '{"sweep": "a", "team": "nlp"}'::jsonb
        ELSE '{"sweep": "a"}' END, 'filler', repeat(md5(n::text), 80)),
    '{}', clock_timestamp() - n * interval '1 s', 'queued', '', 0, 0, 0, 5, false, '', clock_timestamp(), 0
FROM generate_series(1, 5000) n;
INSERT INTO audit (team, actor, token_id, action, target)
SELECT 'default', 'ada', '', 'job.submit', 'job' || n FROM generate_series(1, 5000) n;
ANALYZE jobs; ANALYZE job_labels; ANALYZE audit
"""
ANY = (None, [], None, None, None, None, 50)
LISTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "all jobs": ("jobs", (*ANY, None)),
    "a team's jobs": ("jobs", (*ANY, "default")),
    "an owner's jobs": ("jobs", ("grace", *ANY[1:], None)),
    "queued jobs": ("jobs", (None, ["queued"], *ANY[2:], None)),
    "jobs with a rare label": ("labelled_jobs", (*ANY, None, ["team:nlp"])),
    "jobs with a usual label": ("labelled_jobs", (*ANY, "default", ["sweep:a"])),
    "audit entries": ("audit", (*[None] * 8, 50)),
    "a team's audit entries": ("audit", ("default", *[None] * 7, 50)),
}


@pytest.fixture
async def filled(postgres_dsn: str, raw: Any) -> Any:
    """Return a connection with the API's role to a database with 5,000 jobs."""
    await (await PostgresStore.connect(postgres_dsn, pool_size=1)).close()
    await raw.execute(FILL)
    await raw.execute(f"SET ROLE {API_ROLE}")
    return raw


async def _plan(connection: Any, name: str, values: tuple[Any, ...], operator: str) -> str:
    async with connection.transaction():
        await connection.execute(QUERIES["enter"], "default", operator)
        rows = await connection.fetch(f"EXPLAIN {QUERIES[name]}", *values)
    return "\n".join(row[0] for row in rows)


async def test_lists_read_no_whole_table(filled: Any) -> None:
    for what, (name, values) in LISTS.items():
        for operator in ("on", "off"):
            plan = await _plan(filled, name, values, operator)
            assert "Seq Scan" not in plan, f"{what}, operator {operator}:\n{plan}"
            assert what == "queued jobs" or "Sort" not in plan, f"{what}, operator {operator}:\n{plan}"


async def test_several_labels_select_the_jobs_with_all(filled: Any) -> None:
    for wanted, count in ((["sweep:a", "team:nlp"], 10), (["team:nlp", "sweep:a"], 10), (["sweep:a", "x:y"], 0)):
        async with filled.transaction():
            await filled.execute(QUERIES["enter"], "default", "off")
            rows = await filled.fetch(QUERIES["labelled_jobs"], *ANY, None, wanted)
        assert [row["owner"] for row in rows] == ["grace"] * count, wanted
