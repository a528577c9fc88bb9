"""Fixtures for all tests: one PostgreSQL per session, a fresh database per test."""

import logging
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from hypothesis import HealthCheck, settings

from broker.store.embedded.server import USER, EmbeddedPostgres
from broker.store.migrate import migrate
from tests import tiers

TEMPLATE = "template_gpubroker"

# How long an example takes says how busy the machine is, not whether the code is right. On CI hypothesis' own profile
# stays underneath: it makes the examples repeatable.
settings.register_profile(
    "gpubroker", parent=settings.get_profile(settings.get_current_profile_name()), deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.load_profile("gpubroker")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", action="store_true", help="run the commit's choice of long products: tests/tiers.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files without a chosen test out: every process of pytest-xdist would import them."""
    if collection_path.suffix != ".py" or not collection_path.is_relative_to(config.rootpath):
        return None
    path = collection_path.relative_to(config.rootpath).as_posix()
    return tiers.has_nothing_for(config.option.markexpr, path) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if tiers.is_slow(item.nodeid):
            item.add_marker("slow")
    if config.getoption("--sample"):
        unchosen = tiers.left_out(items, tiers.commit())
        if unchosen:
            config.hook.pytest_deselected(items=unchosen)
            names = {item.nodeid for item in unchosen}
            items[:] = [item for item in items if item.nodeid not in names]
    items.sort(key=lambda item: tiers.turn(item.nodeid))


PATIENT = (
    "broker.notify.slack.client.TIMEOUT_S", "broker.notify.webhook.notifier.CONNECT_S",
    "broker.store.postgres.listener.CONNECT_TIMEOUT_S",
    "broker.store.postgres.pool.CONNECT_TIMEOUT_S", "broker.store.postgres.pool.STATEMENT_TIMEOUT_S",
)  # fmt: skip
"""Time limits for other processes' answers. In tests these processes share this host, which may pause for longer."""


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for limit in PATIENT:
            patched.setattr(limit, 300.0)
        yield


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Restore the log handlers: a daemon in this process logs to the test's stderr, which is closed after the test."""
    root = logging.getLogger()
    level, before = root.level, set(root.handlers)
    yield
    root.setLevel(level)
    for handler in root.handlers[:]:
        if handler not in before and type(handler) is logging.StreamHandler:
            root.removeHandler(handler)


def _database(dsn: str, name: str) -> str:
    return urlunsplit(urlsplit(dsn)._replace(path=f"/{name}"))


async def _administer(dsn: str, statement: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


@pytest.fixture(scope="session")
async def postgres_server() -> AsyncIterator[EmbeddedPostgres]:
    """Yield a server without fsync, its migrated database TEMPLATE to be cloned."""
    folder = Path(tempfile.mkdtemp(prefix="gb-"))  # short: a socket's path has at most 107 bytes
    try:
        async with await EmbeddedPostgres.start(folder, durable=False) as server:
            await _administer(server.admin_dsn, f"CREATE DATABASE {TEMPLATE} OWNER {USER}")
            await migrate(_database(server.dsn, TEMPLATE))
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def _fresh(server: EmbeddedPostgres) -> AsyncIterator[str]:
    name = f"test_{uuid.uuid4().hex}"
    await _administer(server.admin_dsn, f"CREATE DATABASE {name} TEMPLATE {TEMPLATE} OWNER {USER}")
    yield _database(server.dsn, name)
    await _administer(server.admin_dsn, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def postgres_dsn(postgres_server: EmbeddedPostgres) -> AsyncIterator[str]:
    """Yield the dsn of a fresh, migrated database."""
    async with _fresh(postgres_server) as dsn:
        yield dsn


@pytest.fixture
async def second_dsn(postgres_server: EmbeddedPostgres) -> AsyncIterator[str]:
    """Yield the dsn of a second migrated database."""
    async with _fresh(postgres_server) as dsn:
        yield dsn
