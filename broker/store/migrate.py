"""Migration runner: applies numbered SQL files, `NNNN_name.sql`, to a database.

Any number of brokers may call `migrate` at once: an advisory lock admits one at a time, and the next has nothing to
apply. An applied file never changes, because its SHA-256 is stored; a change of the schema is a new file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from broker.domain.errors import SchemaNewer, StoreError, StoreUnavailable

MIGRATIONS = Path(__file__).with_name("migrations")
LOCK_KEY = 0x6770_7562_726F_6B72  # "gpubrokr"; any constant that no other program takes
LOCK_WAIT_S = 300.0
CONNECT_TIMEOUT_S = 30.0

_TABLE = """
CREATE TABLE IF NOT EXISTS schema_migrations (
    version integer PRIMARY KEY,
    name text NOT NULL,
    sha256 text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
)"""
_FILE_NAME = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")


class MigrationError(StoreError):
    """Raised if a migration fails; the schema is unchanged, and the one-line message names migration and fix."""


@dataclass(frozen=True, kw_only=True)
class Migration:
    """One migration file: number, name, text, and the SHA-256 of the text in hex."""

    version: int
    name: str
    sql: str
    sha256: str


def load(folder: Path) -> dict[int, Migration]:
    """Return the migrations in `folder` by number, in order.

    Raises MigrationError for a bad name, a repeated number or an empty folder.
    """
    migrations: dict[int, Migration] = {}
    for path in sorted(folder.glob("*.sql")):
        match = _FILE_NAME.fullmatch(path.name)
        if match is None:
            raise MigrationError(f"migration {path}: the name is not NNNN_name.sql (lower case): rename it")
        version = int(match[1])
        if version in migrations:
            raise MigrationError(
                f"migration {path}: number {match[1]} is {migrations[version].name}'s: take the next one"
            )
        raw = path.read_bytes()
        sha256 = hashlib.sha256(raw).hexdigest()
        migrations[version] = Migration(version=version, name=path.name, sql=raw.decode("utf-8"), sha256=sha256)
    if not migrations:
        raise MigrationError(f"no migrations in {folder}: the installation is incomplete, install gpubroker again")
    return migrations


def pending(files: Mapping[int, Migration], applied: Mapping[int, tuple[str, str]]) -> list[Migration]:
    """Return the migrations that are not applied yet, in order; `applied` maps a number to (name, sha256).

    Raises SchemaNewer if the schema is newer than the files, MigrationError if other files created it.
    """
    newest = max(applied, default=0)
    if newest > max(files):
        raise newer(applied[newest][0], files[max(files)])
    for version, (name, sha256) in sorted(applied.items()):
        file = files.get(version)
        if file is None:
            raise MigrationError(f"migration {name} was applied but its file is missing: put it back")
        if file.sha256 != sha256:
            raise MigrationError(
                f"migration {file.name} was edited after it was applied: restore it, and put the change in a new file"
            )
    left = [file for version, file in files.items() if version not in applied]
    if left and left[0].version < newest:
        raise MigrationError(
            f"migration {left[0].name} comes before {applied[newest][0]}, which is applied: "
            f"give it a number above {newest:04d}"
        )
    return left


def newer(applied: str, own: Migration) -> SchemaNewer:
    """Return the error for a newer schema; `applied` names its newest migration, `own` is this program's newest."""
    return SchemaNewer(
        f"the database's schema is newer ({applied}) than this gpubroker ({own.name}): "
        "upgrade gpubroker, or restore the backup made before the upgrade"
    )


async def require_current(dsn: str, folder: Path = MIGRATIONS) -> None:
    """Check that the schema is current, without migrating it.

    Raises SchemaNewer, StoreUnavailable, and MigrationError if a migration is missing.
    """
    files = load(folder)
    connection = await _connect(dsn)
    try:
        has_migrations = await connection.fetchval("SELECT to_regclass('schema_migrations') IS NOT NULL")
        rows = await connection.fetch("SELECT version, name, sha256 FROM schema_migrations") if has_migrations else []
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise StoreUnavailable(
            f"cannot read the schema version of the database: {reason}; correct database_url"
        ) from error
    finally:
        await connection.close()
    if left := pending(files, {row["version"]: (row["name"], row["sha256"]) for row in rows}):
        older = "has no gpubroker schema" if not rows else f"lacks {left[0].name}"
        raise MigrationError(f"the database {older}: correct database_url, or start the daemon once, which creates it")


async def _apply(connection: asyncpg.Connection[asyncpg.Record], migration: Migration) -> None:
    """Run one file and record it, in one transaction. Raises MigrationError."""
    try:
        async with connection.transaction():
            # Fail early: while a migration waits for a long transaction, all other brokers wait for the migration.
            await connection.execute("SET LOCAL lock_timeout = '10s'")
            await connection.execute(migration.sql)
            await connection.execute(
                "INSERT INTO schema_migrations (version, name, sha256) VALUES ($1, $2, $3)",
                *(migration.version, migration.name, migration.sha256),
            )
    except asyncpg.PostgresError as error:
        position = getattr(error, "position", None)
        line = f", line {migration.sql.count(chr(10), 0, int(position)) + 1}" if position else ""
        reason = str(error).partition("\n")[0]
        raise MigrationError(
            f"migration {migration.name}{line}: {reason}; none of it was applied: correct the cause and start again"
        ) from error


async def _connect(dsn: str) -> asyncpg.Connection[asyncpg.Record]:
    """Connect. Raises StoreUnavailable with the server's message, without the URL, which may contain a password."""
    try:
        return await asyncpg.connect(dsn, timeout=CONNECT_TIMEOUT_S)
    except (OSError, TimeoutError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise StoreUnavailable(
            f"cannot connect to the database: {reason}; correct GPUBROKER_DATABASE_URL (or database_url), or start it"
        ) from error


async def migrate(
    dsn: str, folder: Path = MIGRATIONS, *, before: Callable[[list[str]], None] = lambda names: None
) -> list[str]:
    """Apply the missing migrations, and return the names of the applied files in order.

    `before` receives all names before the first file is applied. After a kill, the next call has fewer files to apply.
    Raises MigrationError (the failing file is rolled back, earlier files stay), SchemaNewer and StoreUnavailable.
    """
    files = load(folder)
    connection = await _connect(dsn)
    try:
        try:
            await connection.execute("SELECT pg_advisory_lock($1)", LOCK_KEY, timeout=LOCK_WAIT_S)
        except TimeoutError:
            raise MigrationError(
                f"another process has been migrating this database for {LOCK_WAIT_S:.0f} s: "
                "wait for it, or end its connection, and start again"
            ) from None
        await connection.execute(_TABLE)
        rows = await connection.fetch("SELECT version, name, sha256 FROM schema_migrations")
        left = pending(files, {row["version"]: (row["name"], row["sha256"]) for row in rows})
        names = [migration.name for migration in left]
        before(names)
        for migration in left:
            await _apply(connection, migration)
        return names
    finally:
        await connection.close()
