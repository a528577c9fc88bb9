"""The migration runner against a real PostgreSQL, with folders of its own."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from broker.domain.errors import SchemaNewer, StoreUnavailable
from broker.store.embedded.server import EmbeddedPostgres
from broker.store.migrate import LOCK_KEY, MigrationError, migrate, require_current

FIRST = "CREATE TABLE a (id integer); CREATE TABLE b (id integer);"
SECOND = "ALTER TABLE a ADD COLUMN name text;"


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedPostgres]:
    async with await EmbeddedPostgres.start(tmp_path_factory.mktemp("state"), durable=False) as server:
        yield server


@pytest.fixture
async def dsn(server: EmbeddedPostgres) -> AsyncIterator[str]:
    """Yield an empty database."""
    admin = await asyncpg.connect(server.admin_dsn)
    await admin.execute("CREATE DATABASE migrated OWNER gpubroker")
    yield server.dsn.replace("/gpubroker?", "/migrated?")
    await admin.execute("DROP DATABASE migrated WITH (FORCE)")
    await admin.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "0001_first.sql").write_text(FIRST)
    (tmp_path / "0002_second.sql").write_text(SECOND)
    return tmp_path


@pytest.mark.parametrize("wrong", ["postgresql://u:hush@127.0.0.1:1/x", "hush", "postgresql://u:hush@127.0.0.1:x/y"])
async def test_a_database_that_cannot_be_reached_is_one_line(wrong: str) -> None:
    with pytest.raises(StoreUnavailable, match="GPUBROKER_DATABASE_URL") as caught:
        await migrate(wrong)
    assert "\n" not in str(caught.value)


async def test_a_database_that_does_not_exist_is_one_line(server: EmbeddedPostgres) -> None:
    with pytest.raises(StoreUnavailable, match='database "absent" does not exist'):
        await migrate(server.dsn.replace("/gpubroker?", "/absent?"))


async def test_missing_migrations_are_named_when_not_applied(dsn: str, folder: Path) -> None:
    with pytest.raises(MigrationError, match="has no gpubroker schema: correct database_url, or start the daemon"):
        await require_current(dsn, folder)
    await migrate(dsn, folder)
    await require_current(dsn, folder)
    (folder / "0003_third.sql").write_text("DROP TABLE b")
    with pytest.raises(MigrationError, match=r"lacks 0003_third\.sql: "):
        await require_current(dsn, folder)
    assert await fetch(dsn, "SELECT name FROM schema_migrations") == ["0001_first.sql", "0002_second.sql"]


async def fetch(dsn: str, query: str) -> list[object]:
    connection = await asyncpg.connect(dsn)
    try:
        return [row[0] for row in await connection.fetch(query)]
    finally:
        await connection.close()


async def columns(dsn: str) -> list[object]:
    query = (
        "SELECT table_name || '.' || column_name FROM information_schema.columns WHERE table_name IN ('a', 'b', 'c')"
    )
    return await fetch(dsn, query + " ORDER BY 1")


async def refused(dsn: str, folder: Path) -> str:
    """Return the message of a refusal, which is one line."""
    with pytest.raises(MigrationError) as error:
        await migrate(dsn, folder)
    assert "\n" not in str(error.value)
    return str(error.value)


async def test_missing_migrations_are_applied_in_order_and_named(dsn: str, folder: Path) -> None:
    assert await migrate(dsn, folder) == ["0001_first.sql", "0002_second.sql"]
    assert await columns(dsn) == ["a.id", "a.name", "b.id"]
    assert await migrate(dsn, folder) == []
    (folder / "0003_third.sql").write_text("CREATE TABLE c (id integer)")
    assert await migrate(dsn, folder) == ["0003_third.sql"]
    assert await fetch(dsn, "SELECT version FROM schema_migrations ORDER BY 1") == [1, 2, 3]


async def test_pending_migrations_are_reported_before_the_first_change(dsn: str, folder: Path) -> None:
    """The hook acts before the first change. If a process is killed after it, the next process finds less to apply."""

    def die(names: list[str]) -> None:
        raise RuntimeError(*names)

    with pytest.raises(RuntimeError, match="first"):
        await migrate(dsn, folder, before=die)
    assert await columns(dsn) == []


async def test_many_at_once_apply_each_file_once(dsn: str, folder: Path) -> None:
    (folder / "0003_slow.sql").write_text("SELECT pg_sleep(0.2); CREATE TABLE c (id integer)")
    applied = await asyncio.gather(*(migrate(dsn, folder) for _ in range(8)))
    assert sorted(name for names in applied for name in names) == [
        "0001_first.sql",
        "0002_second.sql",
        "0003_slow.sql",
    ]


async def test_a_migration_waits_for_a_concurrent_one(dsn: str, folder: Path) -> None:
    other = await asyncpg.connect(dsn)
    await other.execute("SELECT pg_advisory_lock($1)", LOCK_KEY)
    waiting = asyncio.create_task(migrate(dsn, folder))
    async with asyncio.timeout(300):
        while True:
            if await fetch(dsn, "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"):
                break
    assert not waiting.done()
    assert await columns(dsn) == []
    await other.close()
    assert await waiting == ["0001_first.sql", "0002_second.sql"]


async def test_a_failing_file_leaves_nothing_of_itself_and_can_be_corrected(dsn: str, folder: Path) -> None:
    third = folder / "0003_third.sql"
    third.write_text("CREATE TABLE c (id integer);\nINSERT INTO c VALUES (1);\nALTER TABLE nowhere ADD COLUMN x text;")
    message = await refused(dsn, folder)
    assert "0003_third.sql" in message
    assert "nowhere" in message
    assert await columns(dsn) == ["a.id", "a.name", "b.id"]
    third.write_text("CREATE TABLE c (id integer)")
    assert await migrate(dsn, folder) == ["0003_third.sql"]


async def test_a_syntax_error_is_given_its_line(dsn: str, folder: Path) -> None:
    (folder / "0003_third.sql").write_text("CREATE TABLE c (id integer);\n\nCREATE TABEL d (id integer);")
    assert "0003_third.sql, line 3: " in await refused(dsn, folder)


async def test_an_edited_file_is_refused(dsn: str, folder: Path) -> None:
    await migrate(dsn, folder)
    (folder / "0001_first.sql").write_text(FIRST + "\nCREATE TABLE c (id integer);")
    (folder / "0003_third.sql").write_text("CREATE TABLE c (id integer)")
    assert "0001_first.sql was edited" in await refused(dsn, folder)
    assert await columns(dsn) == ["a.id", "a.name", "b.id"]


async def test_a_newer_schema_is_refused(dsn: str, folder: Path) -> None:
    await migrate(dsn, folder)
    (folder / "0002_second.sql").unlink()
    with pytest.raises(SchemaNewer, match=r"newer \(0002_second.sql\) than .*: upgrade gpubroker"):
        await migrate(dsn, folder)


async def test_a_missing_file_is_named(dsn: str, folder: Path) -> None:
    await migrate(dsn, folder)
    (folder / "0001_first.sql").unlink()
    assert "0001_first.sql was applied but its file is missing" in await refused(dsn, folder)


async def test_a_file_put_in_before_an_applied_one_is_refused(dsn: str, folder: Path) -> None:
    (folder / "0005_fifth.sql").write_text("CREATE TABLE c (id integer)")
    await migrate(dsn, folder)
    (folder / "0004_fourth.sql").write_text("DROP TABLE c")
    assert "give it a number above 0005" in await refused(dsn, folder)
    assert "c.id" in await columns(dsn)


@pytest.mark.parametrize("name", ["0002_other.sql", "3_third.sql", "0003_Third.sql"])
async def test_a_bad_or_doubled_name_is_refused_before_anything_is_applied(dsn: str, folder: Path, name: str) -> None:
    (folder / name).write_text("SELECT 1")
    assert name.split("_")[0] in await refused(dsn, folder)
    assert await columns(dsn) == []


async def test_an_empty_folder_is_an_incomplete_installation(dsn: str, tmp_path: Path) -> None:
    assert str(tmp_path) in await refused(dsn, tmp_path)
