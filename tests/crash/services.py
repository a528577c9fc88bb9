"""Services that all rigs of a run share: a PostgreSQL, a blob store, a cloud, and the nursery that forks daemons."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import asyncpg
import psutil
from moto.server import ThreadedMotoServer

from broker.store.embedded import server as embedded
from broker.store.embedded.server import PORT, USER, EmbeddedPostgres
from broker.store.migrate import migrate
from tests.crash.gate import Gate
from tests.crash.loopback_cloud import LoopbackCloud
from tests.crash.proxy import HttpProxy
from tests.crash.waits import Within

TEMPLATE = "template_crash"
BUCKET = "crash"
ENDPOINT = "aws_endpoint"
KEYS = {"aws_region": "us-east-1", "aws_access_key_id": "operator", "aws_secret_access_key": "loopback-only"}
NO_ANSWER = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""Errors that asyncpg raises when a server dies; the last one occurs during a connect."""
RESTART_S = (0.1, 0.1)
"""Back-off before PostgreSQL's restart. It is constant, because a growing one would distort successive kills."""


@dataclass(kw_only=True)
class Nursery:
    """Client of a forking process (`tests.crash.forks`), which handles one order at a time."""

    process: asyncio.subprocess.Process
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def fork(self, **order: Any) -> int:
        """Fork a process and return its PID. A cancelled caller leaves neither a process nor an unread PID."""
        asked = asyncio.ensure_future(self._ask(order))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            number = await asked
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
            raise

    async def _ask(self, order: Mapping[str, Any]) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        async with self._turn:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            return int(await self.process.stdout.readline())


@dataclass(kw_only=True)
class SharedServices:
    postgres: EmbeddedPostgres
    cloud: LoopbackCloud
    moto: str
    turn: asyncio.Lock
    """Lock of the blob store."""
    nursery: Nursery
    folder: Path
    installations: int = 0

    def dsn(self, database: str) -> str:
        return urlunsplit(urlsplit(self.postgres.dsn)._replace(path=f"/{database}"))

    def socket(self) -> str:
        """Return the path of PostgreSQL's socket."""
        folder = dict(part.split("=") for part in urlsplit(self.postgres.dsn).query.split("&"))["host"]
        return f"{folder.replace('%2F', '/')}/.s.PGSQL.{PORT}"

    async def administer(self, statement: str) -> None:
        connection = await asyncpg.connect(self.postgres.admin_dsn)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    async def kill_postgres(self) -> None:
        """Send SIGKILL to the postmaster and its backends; their keeper starts PostgreSQL again."""
        child = self.postgres._child
        assert child is not None
        try:
            postmaster = psutil.Process(child.process.pid)
            backends = postmaster.children(recursive=True)
        except psutil.NoSuchProcess:
            return
        for process in (postmaster, *backends):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        await asyncio.to_thread(psutil.wait_procs, backends, 300)  # the postmaster's own end is for its keeper to take

    async def postgres_answers(self) -> None:
        """Wait until PostgreSQL answers."""
        async with Within(300, "PostgreSQL answers"):
            while True:
                try:
                    return await self.administer("SELECT 1")
                except NO_ANSWER:
                    await asyncio.sleep(0.05)


@asynccontextmanager
async def open_services(*, seed: int = 0, preempts: float = 0.0) -> AsyncIterator[SharedServices]:
    folder = Path(tempfile.mkdtemp(prefix="gb-"))  # short: a socket's path has at most 107 bytes
    restart_s, embedded.RESTART_DELAY_S = embedded.RESTART_DELAY_S, RESTART_S
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.callback(setattr, embedded, "RESTART_DELAY_S", restart_s)
        url = await stack.enter_async_context(blob_store())
        postgres = await stack.enter_async_context(await EmbeddedPostgres.start(folder, durable=False))
        turn = asyncio.Lock()
        agents = HttpProxy(Gate(), "", url, turn)
        await agents.start()
        stack.push_async_callback(agents.stop)
        at: Mapping[str, str] = KEYS | {ENDPOINT: agents.url}
        cloud = await stack.enter_async_context(LoopbackCloud(at, f"s3://{BUCKET}", seed=seed, preempts=preempts))
        nursery = await stack.enter_async_context(nursery_of("tests.crash.nursery"))
        services = SharedServices(postgres=postgres, cloud=cloud, moto=url, turn=turn, nursery=nursery, folder=folder)
        await services.administer(f"CREATE DATABASE {TEMPLATE} OWNER {USER}")
        await migrate(services.dsn(TEMPLATE))
        yield services


@asynccontextmanager
async def blob_store() -> AsyncIterator[str]:
    """Yield the URL of an S3 server that has the bucket."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for each request
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    try:
        host, port = moto.get_host_and_port()
        url = f"http://{host}:{port}"
        async with aiohttp.ClientSession() as client, client.put(f"{url}/{BUCKET}") as answer:
            assert answer.status == 200, await answer.text()
        yield url
    finally:
        moto.stop()


@asynccontextmanager
async def nursery_of(module: str) -> AsyncIterator[Nursery]:
    """Yield a nursery whose processes inherit neither proxy settings nor cloud credentials."""
    inherited = {"PATH", "LANG", "HOME", "PYTHONPATH"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name in inherited},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"ready\n"
        yield Nursery(process=process)
    finally:
        process.stdin.close()  # its end is that of all that it forked
        await process.wait()
