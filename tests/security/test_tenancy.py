"""No call shows one team's data to another team, and the check detects planted leaks."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import asyncpg
import pytest

from broker.runtime.clock import SystemClock
from broker.store.postgres.store import PostgresStore
from tests.security.drivers import Unplayed
from tests.security.http_asks import HttpAsk, http_asks
from tests.security.http_driver import HttpDriver
from tests.security.tenancy import DRIVERS, Plain, compare, play
from tests.security.world import World, world
from tests.support.memory_store.store import MemoryStore


@pytest.mark.parametrize("transport", sorted(DRIVERS))
async def test_memory_gives_nothing_away(transport: str) -> None:
    verdict = await play([DRIVERS[transport]], [MemoryStore(SystemClock()) for _ in range(2)])
    assert verdict.leaks == []
    assert verdict.calls > 100


@pytest.fixture
async def stores(postgres_dsn: str, second_dsn: str) -> AsyncIterator[list[PostgresStore]]:
    async with AsyncExitStack() as stack:
        made = [await PostgresStore.connect(dsn) for dsn in (postgres_dsn, second_dsn)]
        for store in made:
            stack.push_async_callback(store.close)
        yield made


@pytest.mark.parametrize("transport", sorted(DRIVERS))
async def test_postgres_gives_nothing_away(transport: str, stores: list[PostgresStore]) -> None:
    verdict = await play([DRIVERS[transport]], stores)
    assert verdict.leaks == []
    assert verdict.calls > 100


class Some(HttpDriver):
    """Driver that makes only a few of the calls."""

    def __init__(self, operations: set[str]) -> None:
        self._operations = operations

    def asks(self, world: World) -> list[HttpAsk]:
        return [ask for ask in super().asks(world) if ask.label.split()[0] in self._operations]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("ALTER TABLE jobs DISABLE ROW LEVEL SECURITY", {"get_job", "cancel_job", "raise_cap", "quote"}),
        ("ALTER TABLE tokens DISABLE ROW LEVEL SECURITY", {"list_tokens", "delete_token"}),
        ("ALTER TABLE teams DISABLE ROW LEVEL SECURITY", {"list_teams"}),
        ("DROP POLICY team ON attempts", {"get_job", "job_logs"}),
    ],
)
async def test_a_missing_row_level_policy_is_detected(
    change: str, found: set[str], stores: list[PostgresStore], postgres_dsn: str
) -> None:
    async with world(stores[0], blue=True) as both, world(stores[1], blue=False) as alone:
        connection = await asyncpg.connect(postgres_dsn)
        await connection.execute(change)
        await connection.close()
        verdict = await compare(Some(found), both, alone)
    assert found <= {leak.split()[1].rstrip(":") for leak in verdict.leaks}


async def test_an_operation_without_a_scenario_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    op = {"operationId": "new", "parameters": [], "requestBody": {"content": {"x": {"schema": {"type": "string"}}}}}
    taking = {**op, "parameters": [{"name": "colour", "in": "query"}], "requestBody": {}}
    async with world(MemoryStore(SystemClock()), blue=False) as alone:
        for operation in (op, taking):
            paths = {"/v1/new": {"get": operation}}
            monkeypatch.setattr("tests.security.http_asks.document", lambda *_, paths=paths, **__: {"paths": paths})
            with pytest.raises(Unplayed, match="new takes"):
                http_asks(alone)


def test_ids_and_times_are_replaced_and_nothing_else() -> None:
    one = '{"id":"abcdefghijklm","at":"2026-01-01T10:00:00.5Z","n":3}'
    other = '{"id":"bbbbbbbbbbbbb","at":"2027-01-01T10:00:00Z","n":3}'
    assert [Plain().text(text) for text in (one, other)] == ['{"id":"<0>","at":"<1>","n":3}'] * 2
    same = Plain()
    assert same.text("abcdefghijklm") == same.text("abcdefghijklm") != same.text("mbcdefghijklm")
