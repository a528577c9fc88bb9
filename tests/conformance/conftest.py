"""Fixtures: every store behind one fixture."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from broker.ports import Store
from broker.store.postgres.store import PostgresStore
from tests.conformance.samples import ManualClock
from tests.support.memory_store.store import MemoryStore


@dataclass(frozen=True, kw_only=True)
class TimedStore:
    """A store, and a way to let its time pass without waiting."""

    store: Store
    pass_time: Callable[[float], Awaitable[None]]


SHIFT = """
UPDATE jobs SET due_at = due_at - $1 * interval '1 second', lease_until = lease_until - $1 * interval '1 second';
UPDATE jobs SET stored_due_at = stored_due_at - $1 * interval '1 second';
UPDATE uploads SET put_at = put_at - $1 * interval '1 second';
UPDATE attempts SET due_at = due_at - $1 * interval '1 second', lease_until = lease_until - $1 * interval '1 second',
    reviewed_at = reviewed_at - $1 * interval '1 second';
UPDATE channels SET not_before = not_before - $1 * interval '1 second';
UPDATE streams SET due_at = due_at - $1 * interval '1 second', lease_until = lease_until - $1 * interval '1 second',
    refresh_at = refresh_at - $1 * interval '1 second', used_at = used_at - $1 * interval '1 second';
UPDATE deliveries SET at = at - $1 * interval '1 second';
UPDATE notices SET at = at - $1 * interval '1 second';
UPDATE seen SET until = until - $1 * interval '1 second';
UPDATE offer_blocks SET until = until - $1 * interval '1 second'
"""


async def shift_time(dsn: str, seconds: float) -> None:
    """Move all future times nearer, because the database's clock cannot be set."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(SHIFT.replace("$1", str(float(seconds))))
    finally:
        await connection.close()


def memory_timed_store() -> TimedStore:
    clock = ManualClock()

    async def pass_time(seconds: float) -> None:
        clock.time += timedelta(seconds=seconds)

    return TimedStore(store=MemoryStore(clock), pass_time=pass_time)


@pytest.fixture(params=["memory", "postgres"])
def database(request: pytest.FixtureRequest) -> str | None:
    """Return the dsn of the store under test; None for memory."""
    return None if request.param == "memory" else str(request.getfixturevalue("postgres_dsn"))


@pytest.fixture
async def timed_store(database: str | None) -> AsyncIterator[TimedStore]:
    if database is None:
        yield memory_timed_store()
        return
    dsn = database
    store = await PostgresStore.connect(dsn)

    async def pass_time(seconds: float) -> None:
        await shift_time(dsn, seconds)

    yield TimedStore(store=store, pass_time=pass_time)
    await store.close()


@pytest.fixture
def store(timed_store: TimedStore) -> Store:
    return timed_store.store


@pytest.fixture
async def raw(postgres_dsn: str) -> AsyncIterator[Any]:
    """Yield a connection next to the stores' own, as the superuser: it sees every row and takes any lock."""
    connection = await asyncpg.connect(postgres_dsn)
    yield connection
    await connection.close()
