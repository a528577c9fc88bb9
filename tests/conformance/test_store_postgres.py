"""Guarantees of PostgreSQL alone: constraints hold for every writer, and acknowledged writes survive."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from broker.domain.errors import StoreUnavailable
from broker.domain.ids import AttemptId
from broker.domain.job import AttemptState, PriceChange, Signal
from broker.ports import Change, Charge, Lane, Leased, Note
from broker.store.postgres import row_codec
from broker.store.postgres.pool import QUERIES, store_errors
from broker.store.postgres.store import PostgresStore
from tests.conformance.samples import HOUR, START, make_event, running, submitted
from trainer.contract.documents import Heartbeat

ROOT = Path(__file__).parents[2]


def _id(row: Leased) -> AttemptId:
    return row.attempt.id


@pytest.fixture
async def store(postgres_dsn: str) -> AsyncIterator[PostgresStore]:
    store = await PostgresStore.connect(postgres_dsn)
    yield store
    await store.close()


@pytest.fixture
async def connection(postgres_dsn: str) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    connection = await asyncpg.connect(postgres_dsn)
    yield connection
    await connection.close()


async def test_specs_share_equal_parts_in_memory(store: PostgresStore) -> None:
    jobs = [await submitted(store, labels={"n": str(number)}) for number in range(2)]
    first, second = [await store.job(job.id) for job in jobs]
    assert first is not None
    assert second is not None
    assert [first.spec, second.spec] == [job.spec for job in jobs]
    assert first.spec.resources is second.spec.resources


async def test_live_attempts_read_only_rows_that_changed(store: PostgresStore) -> None:
    quiet, _ = await running(store)
    changed, job = await running(store)
    before = {row.attempt.id: row for row in await store.live_attempts()}
    await store.apply([Change(events=(make_event(job),), attempt=(changed, changed))])
    after = {row.attempt.id: row for row in await store.live_attempts()}
    assert after[quiet.id] is before[quiet.id]  # one value: the row was not read again
    assert after[changed.id] is not before[changed.id]


async def test_rows_read_again_equal_rows_read_first(store: PostgresStore, postgres_dsn: str) -> None:
    attempt, job = await running(store)
    await running(store, AttemptState.PLANNED)
    assert len(await store.live_attempts()) == 2
    (leased,) = await store.claim_attempts(Lane.LIVENESS, owner="a", lease_s=HOUR, limit=1)
    beaten = replace(leased.attempt, beat=Heartbeat(attempt=attempt.id, boot="b", seq=1, phase="training", step=7))
    assert await store.apply([Change(attempt=(leased.attempt, beaten))]) == [True]
    price = PriceChange(since=START, usd_per_hour=Decimal(2))
    charge = Charge(attempt_id=attempt.id, job_id=job.id, since=None, to=START, usd=Decimal(3), prices=(price,))
    await store.charge([replace(charge, signal=Signal.CAP)])
    await store.raise_cap(job.id, Decimal(99), make_event(job))
    await store.note([Note(attempt=attempt, job=job, forecast=None, idle="gpu")])
    again = {row.attempt.id: row for row in await store.sent_attempts()}
    assert (again[attempt.id].attempt.signal, again[attempt.id].job.cap_usd) == (Signal.CAP, Decimal(99))
    fresh = await PostgresStore.connect(postgres_dsn, pool_size=1)
    assert again == {row.attempt.id: row for row in await fresh.sent_attempts()}
    assert sorted(await store.live_attempts(), key=_id) == sorted(await fresh.live_attempts(), key=_id)
    await fresh.close()


async def test_planned_attempts_stay_cached_between_reads(store: PostgresStore) -> None:
    await running(store, AttemptState.PLANNED)
    (before,) = await store.live_attempts()
    assert await store.sent_attempts() == []
    (after,) = await store.live_attempts()
    assert after is before


def test_no_statement_changes_a_column_that_is_read_once() -> None:
    """A cached attempt is refreshed without these columns: see `row_codec.changed`."""
    for name, query in QUERIES.items():
        for table, fixed in (("jobs", row_codec.FIXED_JOB_FIELDS), ("attempts", row_codec.FIXED_ATTEMPT_FIELDS)):
            written = {
                column
                for update in re.split(r"(?=UPDATE )", query)
                if update.startswith(f"UPDATE {table} ")
                for column in re.findall(r"(?:SET|,)\s+(\w+) = ", update)
            }
            assert not written & {*fixed}, name


@pytest.mark.parametrize("statement", ["UPDATE ledger SET usd = 0", "DELETE FROM ledger", "TRUNCATE ledger"])
async def test_the_ledger_is_append_only(
    store: PostgresStore, connection: "asyncpg.Connection[asyncpg.Record]", statement: str
) -> None:
    _, job = await running(store)
    with pytest.raises(asyncpg.RestrictViolationError, match="append-only"):
        await connection.execute(statement)
    assert len(await store.ledger(job.id)) == 1


@pytest.mark.parametrize(
    ("statement", "rule"),
    [
        ("UPDATE attempts SET state = 'ended', reason = 'lost'", "attempts_ended"),
        ("UPDATE attempts SET ended_at = now()", "attempts_ended"),
        ("UPDATE attempts SET create_sent_at = NULL", "attempts_create_sent"),
        ("UPDATE attempts SET state = 'draining'", "attempts_reason"),
        ("UPDATE attempts SET state = 'running'", "attempts_state"),
        ("UPDATE attempts SET charged_usd = -1", "attempts_money"),
        ("UPDATE attempts SET destroy_failures = -1", "attempts_counts"),
        ("UPDATE jobs SET cap_usd = 0", "jobs_money"),
        ("UPDATE jobs SET spent_usd = -1", "jobs_money"),
        ("UPDATE jobs SET state = 'failed'", "jobs_finished"),
        ("UPDATE jobs SET attempts = 0", "jobs_active"),
        ("UPDATE jobs SET retries_used = -1", "jobs_counts"),
        ("UPDATE jobs SET preemptions_without_progress = -1", "jobs_preemptions"),
        ("UPDATE jobs SET state = 'lost'", "jobs_state"),
        ("INSERT INTO ledger (job_id, attempt_id, kind, usd, note) SELECT job_id, id, 'charge', -1, '' FROM attempts",
         "ledger_money"),
        ("INSERT INTO ledger (job_id, attempt_id, kind, usd, note) SELECT job_id, id, 'gift', 1, '' FROM attempts",
         "ledger_kind"),
    ],
)  # fmt: skip
async def test_the_schema_refuses_what_breaks_a_rule(
    store: PostgresStore, connection: "asyncpg.Connection[asyncpg.Record]", statement: str, rule: str
) -> None:
    await running(store)
    with pytest.raises(asyncpg.CheckViolationError, match=f'"{rule}"'):
        await connection.execute(statement)


async def test_the_schema_holds_one_live_attempt_a_job(
    store: PostgresStore, connection: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    _, job = await running(store, AttemptState.PLANNED)
    names = "name, line, created_at, reserved_usd, resume_from, state, detail, launched_by, handles, destroy_failures, "
    names += "charged_usd, stop_requested, due_at"
    with pytest.raises(asyncpg.UniqueViolationError, match="one_live"):
        await connection.execute(
            f"INSERT INTO attempts (id, job_id, number, {names}) SELECT 'b', job_id, 2, {names} FROM attempts"
        )
    assert len(await store.attempts(job.id)) == 1


async def test_a_hint_reaches_other_brokers_and_survives_a_lost_connection(
    store: PostgresStore, connection: "asyncpg.Connection[asyncpg.Record]", postgres_dsn: str
) -> None:
    other = await PostgresStore.connect(postgres_dsn)
    try:
        for _ in range(2):
            wait = asyncio.create_task(other.wait("jobs", HOUR))
            while not wait.done():
                await submitted(store)
            assert await wait
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid() AND usename = current_user"
            )
            await asyncio.gather(store.ping(), store.ping(), return_exceptions=True)  # the pool meets its dead ones
    finally:
        await other.close()


async def test_a_hint_before_the_listener_is_ready_is_not_lost(
    store: PostgresStore,
    connection: "asyncpg.Connection[asyncpg.Record]",
    postgres_dsn: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_connect, connect = asyncio.Event(), asyncpg.connect

    async def late(*args: Any, **more: Any) -> Any:
        await may_connect.wait()
        return await connect(*args, **more)

    other = await PostgresStore.connect(postgres_dsn)
    monkeypatch.setattr(asyncpg, "connect", late)
    try:
        for _ in range(2):  # with its first connection, and with the next
            may_connect.clear()
            wait = asyncio.create_task(other.wait("jobs", HOUR))
            await submitted(store)
            assert not wait.done()
            may_connect.set()
            async with asyncio.timeout(300):
                assert await wait
            may_connect.clear()
            ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            assert await connection.fetchval(ended + "WHERE datname = current_database() AND query LIKE 'LISTEN%'")
    finally:
        may_connect.set()
        await other.close()


async def test_a_commit_with_an_unknown_result_is_reported_as_unknown(
    store: PostgresStore, connection: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    _, job = await running(store)
    async with connection.transaction():
        await connection.execute("SELECT FROM jobs FOR UPDATE")
        blocked = asyncio.create_task(store.apply([Change(events=(make_event(job),))]))
        while not await connection.fetchval("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
            continue
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        )
        with pytest.raises(StoreUnavailable):
            await blocked
    assert len(await store.events(job.id, after=0, limit=9)) == 1


async def test_without_a_server_everything_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable):
        await PostgresStore.connect(f"postgresql://nobody@/none?host={tmp_path}&port=1")


CLIENT = """
import asyncio, sys
from broker.store.postgres.store import PostgresStore
from broker.store.postgres.pool import store_errors
from tests.conformance.samples import HOUR, make_event, make_job

async def client(store, number):
    while True:
        job = make_job()
        await store.submit(job, key=job.id, body_sha256="1", events=[make_event(job)])
        print(job.id, flush=True)

async def main():
    store = await PostgresStore.connect(sys.argv[1])
    await asyncio.gather(*(client(store, number) for number in range(20)))

asyncio.run(main())
"""


@pytest.mark.parametrize("acknowledged", [1, 37, 400])
async def test_a_client_killed_amid_submits_loses_none_that_was_acknowledged(
    postgres_dsn: str, connection: "asyncpg.Connection[asyncpg.Record]", acknowledged: int
) -> None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CLIENT, postgres_dsn),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None
    lines = [await child.stdout.readline() for _ in range(acknowledged)]
    child.send_signal(signal.SIGKILL)
    lines += (await child.stdout.read()).splitlines()
    await child.wait()
    answered = {line.decode().strip() for line in lines if len(line.strip()) == 13}
    assert len(answered) >= acknowledged
    found = {row["id"] for row in await connection.fetch("SELECT id FROM jobs")}
    assert answered <= found
    halves = "SELECT count(*) FROM jobs j WHERE event_seq <> (SELECT count(*) FROM events e WHERE e.job_id = j.id)"
    assert await connection.fetchval(halves) == 0


def test_server_that_dies_during_connect_gives_no_answer() -> None:
    """A server that dies during the connect counts as unavailable."""
    with pytest.raises(StoreUnavailable, match="read again"), store_errors("claim"):
        raise asyncpg.InternalClientError("got result for unknown protocol state 3")


async def test_another_database_is_distinguished_from_this_one(postgres_dsn: str, second_dsn: str) -> None:
    """`pg_restore` into a second database creates such a pair."""
    stores = [await PostgresStore.connect(dsn) for dsn in (postgres_dsn, postgres_dsn, second_dsn)]
    one, again, other = [await store.database() for store in stores]
    for store in stores:
        await store.close()
    assert one == again != other
    assert "" not in (one, other)
