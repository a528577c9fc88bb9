"""Queries of every round read live attempts by an index, and not the attempts and jobs of the past."""

import asyncio
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from broker.domain.errors import StoreError, StoreUnavailable
from broker.domain.ids import JobId
from broker.domain.job import Attempt
from broker.ports import Change, Charge, Lane, Note
from broker.store.postgres import row_codec
from broker.store.postgres.pool import QUERIES
from broker.store.postgres.store import PostgresStore
from tests.conformance.samples import HOUR, START, make_event, running

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
PLANNED = "state = 'planned', create_sent_at = NULL, ended_at = NULL, reason = NULL"
INDEX_OF = {
    "live_versions": "attempts_", "live_attempts": "attempts_pkey", "claim_reviews": "attempts_reviewed",
    "lock_noted_attempts": "attempts_pkey", "note_attempts": "attempts_pkey", "live_changes": "attempts_pkey",
}  # fmt: skip
CALLS = {
    "live_versions": (),
    "live_attempts": ("'{1,2,3}'",),
    "live_changes": ("'{1,2,3}'",),
    "lock_noted_attempts": ("'{1,2,3}'",),
    "note_attempts": ("'{1,2}'", "'{a,b}'", "'{NULL,idle}'", "'{NULL,a}'"),
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


async def test_no_round_reads_the_attempts_that_are_still_planned(postgres_dsn: str, raw: Any) -> None:
    store = await PostgresStore.connect(postgres_dsn, pool_size=1)
    await running(store)
    await store.close()
    await raw.execute(COPIES.replace("$1", str(PAST)).replace("$2", str(LIVE)))
    await raw.execute(f"UPDATE attempts SET {PLANNED} WHERE state = 'ended'; ANALYZE attempts")
    plan = "\n".join(row[0] for row in await raw.fetch(f"EXPLAIN {QUERIES['sent_versions']}"))
    assert "attempts_sent" in plan, plan
    assert "Seq Scan on attempts" not in plan, plan


async def test_a_refused_note_leaves_the_others_written(postgres_dsn: str) -> None:
    store = await PostgresStore.connect(postgres_dsn, pool_size=1)
    (good, job), (bad, other) = await running(store), await running(store)
    foreign = make_event(replace(other, id=JobId("absent")), "attempt.stays")
    notes = [
        Note(attempt=bad, job=other, forecast=None, idle="gpu", events=(foreign,)),
        Note(attempt=good, job=job, forecast=None, idle="gpu"),
    ]
    with pytest.raises(StoreError):
        await store.note(notes)
    assert [(await store.attempts(each.id))[0].idle for each in (job, other)] == ["gpu", None]
    await store.close()


async def test_concurrent_single_changes_share_a_transaction(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await PostgresStore.connect(postgres_dsn, pool_size=4)
    for _ in range(20):
        await running(store)
    rows = await store.claim_attempts(Lane.LIVENESS, owner="a", lease_s=HOUR, limit=20)
    changes = [Change(attempt=(row.attempt, replace(row.attempt, detail=f"of {row.attempt.id}"))) for row in rows]
    stale = Change(attempt=(replace(rows[0].attempt, epoch=0), replace(rows[0].attempt, detail="late", epoch=0)))
    job = rows[0].job
    bad = Change(charge=Charge(attempt_id=rows[0].attempt.id, job_id=job.id, since=None, to=START, usd=Decimal(-1)))
    opened: list[str] = []
    transaction = store._pool.transaction

    def counted(doing: str) -> Any:
        opened.append(doing)
        return transaction(doing)

    monkeypatch.setattr(store._pool, "transaction", counted)
    answers = await asyncio.gather(*(store.apply([change]) for change in [*changes, stale]))
    assert answers == [[True]] * 20 + [[False]]
    assert len(opened) <= 2  # the stale change writes a row that another change writes, so it follows
    assert {a.detail for a in (await store.attempts_by_id([r.attempt.id for r in rows])).values()} == {
        f"of {row.attempt.id}" for row in rows
    }
    outcomes = await asyncio.gather(*(store.apply([c]) for c in (bad, stale)), return_exceptions=True)
    assert isinstance(outcomes[0], StoreError)
    assert outcomes[1] == [False]
    await store.close()


async def test_an_unexpected_error_reaches_its_caller_only(postgres_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled future in its place would end the controllers of all changes in the group."""
    store = await PostgresStore.connect(postgres_dsn, pool_size=2)
    for _ in range(3):
        await running(store)
    rows = await store.claim_attempts(Lane.LIVENESS, owner="a", lease_s=HOUR, limit=3)
    changes = [Change(attempt=(row.attempt, replace(row.attempt, detail="new"))) for row in rows]
    written = row_codec.written_attempt

    def encode(read: Attempt, to: Attempt, due_in_s: float) -> Any:
        if to.id == rows[1].attempt.id:
            raise ValueError("no encoding")
        return written(read, to, due_in_s)

    monkeypatch.setattr(row_codec, "written_attempt", encode)
    outcomes = await asyncio.gather(*(store.apply([change]) for change in changes), return_exceptions=True)
    assert (outcomes[0], outcomes[2]) == ([True], [True])
    assert isinstance(outcomes[1], ValueError)
    monkeypatch.undo()
    assert await store.apply([changes[1]]) == [True]
    await store.close()


async def test_a_change_is_not_written_after_its_caller_gave_up(postgres_dsn: str) -> None:
    store = await PostgresStore.connect(postgres_dsn, pool_size=2)
    await running(store)
    [row] = await store.claim_attempts(Lane.LIVENESS, owner="a", lease_s=HOUR, limit=1)
    call = asyncio.create_task(store.apply([Change(attempt=(row.attempt, replace(row.attempt, detail="late")))]))
    await asyncio.sleep(0)  # the call waits for its transaction, which has not begun
    call.cancel()
    await asyncio.wait({call})
    await store.close()
    again = await PostgresStore.connect(postgres_dsn, pool_size=1)
    assert (await again.attempts_by_id([row.attempt.id]))[row.attempt.id].detail == row.attempt.detail
    await again.close()


async def test_the_server_ends_the_transaction_of_a_frozen_broker(
    postgres_dsn: str, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.store.postgres.pool.IDLE_TRANSACTION_S", 0.1)
    store = await PostgresStore.connect(postgres_dsn, pool_size=1)
    _, job = await running(store)
    locked = "SELECT FROM jobs WHERE id = $1 FOR UPDATE"

    async def freeze() -> None:
        async with store._pool.transaction("freeze") as connection:
            await connection.fetch(locked, job.id)
            await raw.execute("SET statement_timeout = '20s'")
            await raw.fetch(locked, job.id)  # waits for the lock
            await connection.fetch("SELECT 1")

    with pytest.raises(StoreUnavailable):
        await freeze()
    await store.close()
