"""Guarantees of policies against concurrent writers to the same database."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import asyncpg
import pytest

from broker.domain.job import AttemptState, Job, JobState
from broker.domain.money import LedgerEntry, LedgerKind
from broker.domain.policy import Policy
from broker.ports import Change, Charge
from broker.store.postgres.store import PostgresStore
from tests.conformance.samples import (
    HOUR,
    START,
    admission,
    claimed_job,
    in_state,
    make_event,
    running,
    submitted,
)

COMMITTED = """
SELECT (SELECT COALESCE(sum(usd), 0) FROM usage)
    + (SELECT COALESCE(sum(GREATEST(reserved_usd - charged_usd, 0)), 0) FROM attempts WHERE state <> 'ended')
"""
USAGE_BY_LEDGER = """
SELECT j.team, j.owner, date_bin('15 minutes', l.at, 'epoch') AS bucket, sum(l.usd) AS usd
FROM ledger l JOIN jobs j ON j.id = l.job_id WHERE l.kind IN ('charge', 'adjustment') GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
"""


@pytest.fixture
async def brokers(postgres_dsn: str) -> AsyncIterator[list[PostgresStore]]:
    """Yield several stores on one database, each with its own connections."""
    made = [await PostgresStore.connect(postgres_dsn, pool_size=4) for _ in range(3)]
    yield made
    for store in made:
        await store.close()


def policy(name: str = "limits", **rules: Any) -> Policy:
    return Policy.model_validate({"name": name, "team": "default", **rules})


def month(limit: str) -> list[dict[str, Any]]:
    return [{"limit_usd": limit, "per": "month", "window": "rolling"}]


def reserving(job: Job, usd: Decimal) -> Change:
    """Return an admission that reserves `usd`."""
    made = admission(job, job.attempts + 1)
    assert made.admit is not None
    entry = replace(made.ledger[0], usd=usd)
    return replace(made, admit=replace(made.admit, reserved_usd=usd), ledger=(entry,))


async def blocked(raw: Any, waiting: "asyncio.Task[Any]", *, by: int = 1) -> None:
    """Wait until `by` sessions wait for a lock."""
    while await raw.fetchval("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'") < by:
        assert not waiting.done(), "it did not wait for the lock"


async def test_concurrent_admissions_pass_no_limit(brokers: list[PostgresStore], raw: Any) -> None:
    limit, rng = Decimal(100), random.Random(1)
    for name, rules in (("team", {"budgets": month("100")}), ("ann", {"user": "ann", "budgets": month("60")}),
                        ("all", {"team": None, "max_jobs": 40})):  # fmt: skip
        await brokers[0].put_policy(policy(name, **rules))
    await asyncio.gather(*(submitted(brokers[0], owner=rng.choice(["ann", "bob"])) for _ in range(240)))

    async def broker(store: PostgresStore, own: str) -> int:
        """Admit attempts, alone and in batches, charge a part, and end some, so that others get the rest."""
        admitted, chance = 0, random.Random(own)
        while jobs := await store.claim_jobs(
            [JobState.QUEUED], owner=own, lease_s=HOUR, limit=chance.choice([1, 3, 9])
        ):
            held = await store.apply([reserving(job, Decimal(chance.randint(1, 700)) / 100) for job in jobs])
            for job in (job for job, ok in zip(jobs, held, strict=True) if ok):
                admitted += 1
                await use(store, job, chance)
        return admitted

    async def use(store: PostgresStore, job: Job, chance: random.Random) -> None:
        (attempt,) = await store.attempts(job.id)
        usd = attempt.reserved_usd * chance.randint(0, 100) / 100
        await store.charge([Charge(attempt_id=attempt.id, job_id=job.id, since=None, to=START, usd=usd)])
        if chance.random() < 0.5:
            over = replace(job, state=JobState.FAILED, attempts=1, finished_at=START)
            now = replace(job, state=JobState.ACTIVE, attempts=1)
            ended = replace(in_state(attempt, AttemptState.ENDED), ended_at=START + timedelta(hours=1))
            assert await store.apply([Change(attempt=(attempt, ended), job=(now, over))]) == [True]

    work = [asyncio.create_task(broker(store, f"{n}/{m}")) for n, store in enumerate(brokers) for m in range(4)]
    seen = []
    while not all(task.done() for task in work):
        seen.append(await raw.fetchval(COMMITTED))
    admitted = sum(await asyncio.gather(*work))
    seen.append(await raw.fetchval(COMMITTED))
    assert 20 < admitted < 240
    assert max(seen) <= limit
    assert max(seen) > limit * Decimal("0.9")
    assert await raw.fetchval("SELECT count(*) FROM attempts WHERE state <> 'ended'") <= 40
    ann = "SELECT COALESCE(sum(usd), 0) FROM usage WHERE owner = 'ann'"
    assert await raw.fetchval(ann) <= 60
    counted = await raw.fetch("SELECT * FROM usage ORDER BY 1, 2, 3")
    assert [tuple(row) for row in counted] == [tuple(row) for row in await raw.fetch(USAGE_BY_LEDGER)]


async def test_admission_waits_for_the_policy_lock_and_sees_its_writes(brokers: list[PostgresStore], raw: Any) -> None:
    """An admission waits for the transaction that holds the policy, and sees its writes."""
    store = brokers[0]
    await store.put_policy(policy(budgets=month("20")))
    attempt, other = await running(store)
    await submitted(store)
    job = await claimed_job(store)
    async with raw.transaction():
        await raw.execute("SELECT FROM policies FOR UPDATE")
        waiting = asyncio.create_task(store.apply([admission(job)]))
        await blocked(raw, waiting)
        await raw.execute("UPDATE attempts SET reserved_usd = reserved_usd + 5 WHERE id = $1", attempt.id)
    assert await waiting == [False]
    await raw.execute("UPDATE attempts SET reserved_usd = reserved_usd - 5 WHERE id = $1", attempt.id)
    again = await store.apply([admission(job)])
    assert again == [True]
    assert (await store.job(other.id)) is not None


async def test_a_policy_that_changes_while_an_admission_waits_is_obeyed(brokers: list[PostgresStore], raw: Any) -> None:
    store = brokers[0]
    await store.put_policy(policy(max_jobs=5))
    await submitted(store)
    job = await claimed_job(store)
    async with raw.transaction():
        await raw.execute("SELECT FROM policies FOR UPDATE")
        waiting = asyncio.create_task(store.apply([admission(job)]))
        await blocked(raw, waiting)
        await raw.execute("UPDATE policies SET document = document || '{\"max_jobs\": 0}'")
    assert await waiting == [False]


async def test_a_new_policy_counts_what_is_being_admitted_while_it_is_made(
    brokers: list[PostgresStore], raw: Any
) -> None:
    """The admission in progress read no policy. The next admission must count it."""
    await submitted(brokers[0])
    await submitted(brokers[0])
    jobs = [await claimed_job(brokers[0]) for _ in range(2)]

    async def after(made: "asyncio.Task[Any]") -> list[bool]:
        await made
        return await brokers[2].apply([reserving(jobs[1], Decimal(9))])  # type: ignore[return-value]

    async with raw.transaction():
        await raw.execute("LOCK TABLE ledger IN EXCLUSIVE MODE")
        first = asyncio.create_task(brokers[0].apply([reserving(jobs[0], Decimal(9))]))
        await blocked(raw, first)
        second = asyncio.create_task(after(asyncio.create_task(brokers[1].put_policy(policy(budgets=month("10"))))))
        await blocked(raw, second, by=2)
    assert [await first, await second] == [[True], [False]]
    assert await raw.fetchval(COMMITTED) == 9


async def test_every_ledger_entry_counts_as_spending(brokers: list[PostgresStore], raw: Any) -> None:
    store = brokers[0]
    attempt, job = await running(store)
    entry = LedgerEntry(job_id=job.id, attempt_id=attempt.id, kind=LedgerKind.ADJUSTMENT, usd=Decimal("0.5"))
    await store.apply([Change(ledger=(entry,), events=(make_event(job),))])
    await raw.execute(
        "INSERT INTO ledger (job_id, attempt_id, kind, usd, note) SELECT $1, $2, kind, usd, '' FROM "
        "(VALUES ('charge', 1.0), ('adjustment', 2.5), ('release', 9), ('reservation', 9)) AS own (kind, usd)",
        job.id,
        attempt.id,
    )
    assert await raw.fetchval("SELECT sum(usd) FROM usage") == Decimal("4.0")


@pytest.mark.parametrize(
    ("statement", "rule"),
    [
        ("INSERT INTO ledger (job_id, attempt_id, kind, usd, note) SELECT job_id, id, 'charge', 'NaN', '' "
         "FROM attempts",
         "ledger_finite"),
        ("UPDATE jobs SET cap_usd = 'NaN'", "jobs_finite"),
        ("UPDATE jobs SET spent_usd = 'Infinity'", "jobs_finite"),
        ("UPDATE jobs SET approved_usd = 'NaN'", "jobs_approved"),
        ("UPDATE jobs SET approved_usd = 0", "jobs_approved"),
        ("UPDATE attempts SET reserved_usd = 'NaN'", "attempts_finite"),
        ("UPDATE attempts SET charged_usd = 'Infinity'", "attempts_finite"),
        ("INSERT INTO usage VALUES ('default', 'ann', '2026-01-01', -1)", "usage_money"),
        ("INSERT INTO usage VALUES ('default', 'ann', '2026-01-01', 'NaN')", "usage_money"),
        ("INSERT INTO usage VALUES ('default', 'ann', '2026-01-01 00:07Z', 1)", "usage_bucket"),
    ],
)  # fmt: skip
async def test_the_schema_refuses_amounts_that_are_not_finite(
    brokers: list[PostgresStore], raw: Any, statement: str, rule: str
) -> None:
    await running(brokers[0])
    with pytest.raises(asyncpg.CheckViolationError, match=f'"{rule}"'):
        await raw.execute(statement)


async def test_the_queue_has_an_index(brokers: list[PostgresStore], raw: Any) -> None:
    """The first of thousands of queued jobs are found without a sort of all."""
    await submitted(brokers[0])
    await raw.execute("SET enable_seqscan = off; SET enable_sort = off")
    plan = await raw.fetch(
        "EXPLAIN SELECT id FROM jobs WHERE state = 'queued' AND due_at <= now() "
        "ORDER BY priority DESC, created_at, id LIMIT 9"
    )
    assert "jobs_queue" in " ".join(row[0] for row in plan)
