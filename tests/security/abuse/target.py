"""Daemon with bounded memory, with tokens of the attacker's team and of another team."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil

from tests.crash.daemon import Daemon

MEMORY_BYTES = 1024**3
LIMITED = (
    "import resource, runpy, sys\n"
    f"resource.setrlimit(resource.RLIMIT_DATA, ({MEMORY_BYTES}, {MEMORY_BYTES}))\n"
    "sys.argv[0] = 'gpubroker'\n"
    "runpy.run_module('broker.cli', run_name='__main__')\n"
)
MODEL = "HuggingFaceTB/SmolLM2-135M"


@dataclass
class Target:
    """A running daemon and the tokens of two teams."""

    daemon: Daemon
    url: str
    grpc: str
    """`host:port` of the gRPC API."""
    admin: str
    attacker: str
    other: str
    http: aiohttp.ClientSession

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def process(self) -> psutil.Process:
        """The daemon's process."""
        assert self.daemon.process is not None
        return psutil.Process(self.daemon.process.pid)

    def is_alive(self) -> bool:
        return self.daemon.process is not None and self.daemon.process.returncode is None

    async def call(self, method: str, path: str, token: str, **options: Any) -> tuple[int, Any]:
        """Return (status, JSON) of a call."""
        headers = {"Authorization": f"Bearer {token}", **options.pop("headers", {})}
        async with self.http.request(method, self.url + path, headers=headers, **options) as answer:
            return answer.status, await answer.json(content_type=None)

    async def upload(self, data: bytes, name: str) -> tuple[int, Any]:
        """Upload a file as the attacker."""
        octets = {"Content-Type": "application/octet-stream"}
        return await self.call("POST", f"/v1/uploads?name={name}", self.attacker, data=data, headers=octets)


@asynccontextmanager
async def target() -> AsyncIterator[Target]:
    """Start a daemon whose process may allocate MEMORY_BYTES, and create two teams."""
    daemon = Daemon(trusted=True)  # of two teams: the attacks of quotes need offers
    file = daemon.home / "gpubroker.yaml"
    file.write_text(file.read_text().replace("local: null", "local: {}"))  # untrusted, for the attacks on the host
    daemon.command = (sys.executable, "-c", LIMITED)
    try:
        await daemon.start()
        client = json.loads((daemon.home / "client.json").read_text())
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            running = Target(daemon, client["url"], client["grpc"], client["token"], "", "", http)
            for team in ("red", "blue"):
                status, answer = await running.call("POST", "/v1/teams", running.admin, json={"name": team})
                assert status == 201, answer
            running.attacker, running.other = [await _token(running, team) for team in ("red", "blue")]
            yield running
    finally:
        await daemon.remove()


async def _token(running: Target, team: str) -> str:
    body = {"owner": f"of-{team}", "team": team, "scopes": ["read", "submit"]}
    status, answer = await running.call("POST", "/v1/tokens", running.admin, json=body)
    assert status == 201, answer
    return str(answer["token"])


async def repeated(seconds: float, attempt: Callable[[], Awaitable[Any]], parallel: int = 3) -> None:
    """Repeat an attempt in parallel for some seconds. The target may refuse or drop every attempt."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds

    async def again() -> None:
        while loop.time() < end:
            try:
                await attempt()
            except (OSError, aiohttp.ClientError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.01)

    await asyncio.gather(*(again() for _ in range(parallel)))


async def send_raw(running: Target, data: bytes) -> bytes:
    """Send bytes over a new connection, and return the first bytes of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    try:
        writer.write(data)
        await writer.drain()
        return await asyncio.wait_for(reader.read(64), 30)
    except TimeoutError:
        return b""
    finally:
        writer.close()


def unique() -> str:
    """Return a text that no earlier attempt used, so that no cache answers."""
    return os.urandom(6).hex()
