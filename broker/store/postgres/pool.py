"""Connection pool, SQL statements by name, and the translation of asyncpg's errors."""

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import asyncpg
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from broker.domain.errors import StoreError, StoreUnavailable
from broker.domain.tenancy import Tenant
from broker.store.postgres.row_codec import CHANGED_COLUMNS, JOB_COLUMNS

T = TypeVar("T")
Connection: TypeAlias = "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]"

STATEMENT_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10.0
IDLE_TRANSACTION_S = 15
"""Time after which the server ends a transaction without a statement, so that a frozen broker keeps no locks."""

_UNAVAILABLE = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # a server that dies while it is being connected to
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.TransactionRollbackError,
)


class RolledBack(StoreUnavailable):
    """A deadlock or serialization failure: nothing was written, so the caller may try the same again."""


def _load(folder: Path) -> dict[str, str]:
    """Return the statements of all SQL files in `folder`, by the name in their `-- name:` line."""
    statements: dict[str, str] = {}
    for path in sorted(folder.glob("*.sql")):
        parts = re.split(r"^-- name: (\w+)\n", path.read_text("utf-8"), flags=re.MULTILINE)
        for name, body in zip(parts[1::2], parts[2::2], strict=True):
            if name in statements:
                raise ValueError(f"{path}: a statement {name} exists already; name it otherwise")
            statements[name] = body.replace("{job_columns}", JOB_COLUMNS).replace("{changed_columns}", CHANGED_COLUMNS)
    return statements


QUERIES = _load(Path(__file__).with_name("sql"))


@contextmanager
def store_errors(doing: str) -> Iterator[None]:
    """Raise errors of asyncpg as StoreError or StoreUnavailable; `doing`: the operation for the message."""
    try:
        yield
    except (asyncpg.DeadlockDetectedError, asyncpg.SerializationError) as error:
        raise RolledBack(f"{doing}: {_line(error)}; nothing was written, try again") from error
    except _UNAVAILABLE as error:
        if isinstance(error, asyncpg.InterfaceError) and isinstance(error, ValueError):
            raise StoreError(f"{doing}: {_line(error)}; nothing was written") from error  # a value that has no encoding
        raise StoreUnavailable(
            f"{doing}: the database gave no answer ({_line(error)}); "
            "the request may or may not have taken effect, read again"
        ) from error
    except asyncpg.PostgresError as error:
        rule = getattr(error, "constraint_name", None)
        raise StoreError(f"{doing}: {f'rule {rule}: ' if rule else ''}{_line(error)}; nothing was written") from error


def _line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]


def columns(rows: Iterable[tuple[Any, ...]]) -> tuple[list[Any], ...]:
    """Convert rows (at least one) to one array for each column, as `unnest` needs them."""
    return tuple(list(column) for column in zip(*rows, strict=True))


async def _no_reset(connection: object) -> None:
    """Do not reset a returned connection: no statement leaves session state, and a reset costs a round trip."""


class BooksTime:
    """Time of new ledger entries and of budgets' windows, shared by the pools of a store."""

    trusted: Callable[[], datetime] | None = None
    """Time that a step of the database's clock does not change; None: the database's clock counts."""

    def now(self) -> datetime | None:
        return self.trusted() if self.trusted else None


class Pool:
    """Runs named statements. Raises StoreUnavailable, StoreError."""

    def __init__(self, pool: "asyncpg.Pool[asyncpg.Record]", books: BooksTime | None = None) -> None:
        self._pool = pool
        self.books = books or BooksTime()

    @classmethod
    async def connect(cls, dsn: str, size: int, *, role: str | None = None) -> "Pool":
        """Open a pool; every connection uses `role` from its first statement on, even after a reset."""
        as_role = {"role": role} if role else {}
        with store_errors("connecting"):
            pool = await asyncpg.create_pool(
                dsn,
                min_size=1,
                max_size=size,
                reset=_no_reset,
                timeout=CONNECT_TIMEOUT_S,
                command_timeout=STATEMENT_TIMEOUT_S,
                server_settings={
                    "application_name": "gpubroker",
                    "timezone": "UTC",
                    "jit": "off",
                    "idle_in_transaction_session_timeout": f"{IDLE_TRANSACTION_S}s",
                    **as_role,
                },
            )
        return cls(pool)

    def as_tenant(self, tenant: Tenant) -> "Pool":
        """Return a pool on the same connections whose transactions are restricted to the tenant."""
        return _TenantPool(self._pool, self.books, tenant)

    async def fetch(self, name: str, *values: Any) -> list[asyncpg.Record]:
        """Run one statement in its own transaction."""
        with store_errors(name):
            return await self._pool.fetch(QUERIES[name], *values)

    async def read(self, name: str, *values: Any) -> list[asyncpg.Record]:
        """Run one statement that is safe to repeat; it is retried while the database restarts."""
        return await self.retried(lambda: self.fetch(name, *values), StoreUnavailable)

    async def retried(self, call: Callable[[], Awaitable[T]], on: type[StoreError]) -> T:
        """Return the result of `call`; after the error `on`, retry it up to four times within about a second."""
        with contextlib.suppress(on):
            return await call()
        wait = wait_random_exponential(0.1, max=0.5)
        await asyncio.sleep(random.uniform(0.0, 0.1))
        policy = AsyncRetrying(retry=retry_if_exception_type(on), stop=stop_after_attempt(4), wait=wait, reraise=True)

        async def once() -> T:  # tenacity awaits coroutine functions only, not a coroutine that a lambda returns
            return await call()

        return await policy(once)

    @asynccontextmanager
    async def transaction(self, doing: str) -> AsyncIterator[Connection]:
        """Open a transaction. If its end raises StoreUnavailable, the commit's outcome is unknown."""
        with store_errors(doing):
            async with self._pool.acquire() as connection, connection.transaction():
                yield connection

    async def close(self) -> None:
        """Close the pool after a short wait for running statements."""
        try:
            async with asyncio.timeout(5):
                await self._pool.close()
        except TimeoutError:
            self._pool.terminate()


async def enter(connection: Connection, team: str, *, operator: bool) -> None:
    """Restrict the current transaction to the rows of one team: see migrations/0001_initial.sql."""
    await connection.execute(QUERIES["enter"], team, "on" if operator else "off")


class _TenantPool(Pool):
    """Pool that shares the connections of another pool, and closes none."""

    def __init__(self, pool: "asyncpg.Pool[asyncpg.Record]", books: BooksTime, tenant: Tenant) -> None:
        super().__init__(pool, books)
        self._tenant = tenant

    async def fetch(self, name: str, *values: Any) -> list[asyncpg.Record]:
        async with self.transaction(name) as connection:
            return await connection.fetch(QUERIES[name], *values)

    @asynccontextmanager
    async def transaction(self, doing: str) -> AsyncIterator[Connection]:
        async with super().transaction(doing) as connection:
            await enter(connection, self._tenant.team, operator=self._tenant.operator)
            yield connection
