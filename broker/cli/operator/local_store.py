"""Access to an installation's id and database on the daemon's host, for commands that need no daemon."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from broker.cli.core.exit_codes import BadInput, ServerProblem
from broker.daemon.config import DaemonConfig
from broker.daemon.home_dir import is_held
from broker.domain.errors import GpubrokerError, InvalidInput
from broker.domain.ids import INSTALLATION_LENGTH, Installation
from broker.store.embedded.server import EmbeddedPostgres, StateFolderLocked

if TYPE_CHECKING:
    from broker.store.postgres.store import PostgresStore

Home = Annotated[Path | None, typer.Option(help="The daemon's state folder. Default: $GPUBROKER_HOME.")]
Config = Annotated[Path | None, typer.Option(help="Configuration file. Default: gpubroker.yaml in the home.")]
Named = Annotated[
    str | None, typer.Option("--installation", metavar="ID", help="Installation id. Default: this home's.")
]


class Opened(NamedTuple):
    """An opened database with its configuration."""

    settings: DaemonConfig
    installation: Installation
    """Installation that the daemon buys machines for."""
    store: "PostgresStore"
    lives: bool
    """True if a daemon runs on this home."""


@asynccontextmanager
async def opened(home: Path | None, config: Path | None, named: str | None) -> "AsyncIterator[Opened]":
    """Open a daemon's configuration and database. Raises BadInput, ServerProblem."""
    try:
        settings = DaemonConfig.load(config, home=home)
        async with AsyncExitStack() as stack:
            if not _has_database(settings):  # checked before the installation id, because a wrong home has neither
                raise BadInput(f"{settings.home} has no database; run this where the daemon runs, or give --home")
            name = installation_of(settings, named)
            store, lives = await store_of(settings, name, stack)
            assert store is not None
            if await store.known_installation() is None:
                raise BadInput("the database belongs to no installation yet; start the daemon once")
            yield Opened(settings, name, store, lives or is_held(settings.home))
    except InvalidInput as e:
        raise BadInput("\n".join(f"{p.field}: {p.message}" for p in e.problems)) from None
    except GpubrokerError as e:
        raise ServerProblem(str(e)) from None


def installation_of(settings: DaemonConfig, named: str | None) -> Installation:
    """Return the installation id. Raises BadInput if it is unknown, to not touch another installation's machines."""
    file = settings.home / "installation"
    name = named or (file.read_text().strip() if file.exists() else "")
    if len(name) != INSTALLATION_LENGTH:
        hint = f"on the daemon's host it is in {file}"
        raise BadInput(f"unknown installation; give --installation, {INSTALLATION_LENGTH} characters; {hint}")
    return Installation(name)


async def store_of(
    settings: DaemonConfig, name: Installation, stack: AsyncExitStack
) -> "tuple[PostgresStore | None, bool]":
    """Return (the database, or None if it does not exist; whether a daemon on this home runs it).

    The stack closes the database. An empty database is not assigned to the installation.
    Raises BadInput if the database belongs to another installation, and GpubrokerError.
    """
    from broker.store.migrate import require_current
    from broker.store.postgres.store import PostgresStore

    dsn, daemon = await _database(settings, stack)
    if dsn is None:
        return None, daemon
    await require_current(dsn)
    store = await PostgresStore.connect(dsn)
    stack.push_async_callback(store.close)
    if (owner := await store.known_installation()) not in (None, name):
        raise BadInput(f"the database belongs to installation {owner}, not {name}; correct one of the two")
    return store, daemon


def _has_database(settings: DaemonConfig) -> bool:
    return settings.database_url is not None or _own(settings).exists()


def _own(settings: DaemonConfig) -> Path:
    return settings.home / "postgres"


async def _database(settings: DaemonConfig, stack: AsyncExitStack) -> tuple[str | None, bool]:
    """Return (address of the configured or embedded server, or None; whether a daemon runs the embedded server)."""
    if settings.database_url is not None:
        return settings.database_url, False
    if not _has_database(settings):
        return None, False
    folder = _own(settings)
    try:
        server = await stack.enter_async_context(await EmbeddedPostgres.start(folder))
    except StateFolderLocked:
        return EmbeddedPostgres.dsn_of(folder), True
    return server.dsn, False
