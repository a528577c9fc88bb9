"""Daemon that is restarted whenever it ends."""

import asyncio
import base64
import contextlib
import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import yaml

from broker.client.async_client import AsyncClient
from broker.domain.ids import Installation
from tests.crash.gate import Gate
from tests.crash.nursery import READY
from tests.crash.proxy import HttpProxy, PostgresProxy
from tests.crash.services import BUCKET, ENDPOINT, KEYS, SharedServices
from tests.crash.waits import Within

CONFIG: dict[str, Any] = {
    "port": 0,
    "grpc": {"port": None},
    "grants": {"scope": False},
    "providers": {"local": None},
    "intervals": {
        "poll_s": 0.05, "look_s": 0.1, "list_s": 0.1, "billing_s": 0.2, "sweep_s": 0.5, "market_s": 1, "deadman_s": 0.5,
    },
    "limits": {"heartbeat_s": 0.1, "poll_s": 0.1, "log_s": 0.5, "drain_s": 5},
}  # fmt: skip
POLL_S = 0.03
SETTLE_S = 300.0
"""Seconds within which all jobs must end; far above their usual duration."""


class SupervisedDaemon:
    """A daemon's home, its proxies, and the process that runs now."""

    def __init__(self, services: SharedServices, home: Path) -> None:
        self._services, self.home = services, home
        self.gate = Gate(end=self.end)
        self.database = PostgresProxy(self.gate, services.socket)
        self.http = HttpProxy(self.gate, services.cloud.url, services.moto, services.turn)
        self.starts = 0
        self.orders: dict[str, Any] = {}
        """Further fields of the order to the nursery at every start; `die_at` applies to the next start only."""
        self._pidfd: int | None = None
        self._number = 0
        self._keeper: asyncio.Task[None] | None = None

    async def prepare(self, database: str, installation: Installation | None, master: bytes) -> None:
        """Create the home. `installation` None: no daemon ever ran in it."""
        await self.database.start()
        await self.http.start()
        self.home.mkdir(mode=0o700, parents=True)
        config = CONFIG | {
            "database_url": f"postgresql://gpubroker@127.0.0.1:{self.database.port}/{database}?sslmode=disable",
            "blobs": f"s3://{BUCKET}",
            "blob_options": KEYS | {ENDPOINT: self.http.url},
        }
        (self.home / "gpubroker.yaml").write_text(yaml.safe_dump(config))
        if installation is None:
            return
        (self.home / "installation").write_text(installation + "\n")
        key = self.home / "master.key"
        key.touch(mode=0o600)
        key.write_bytes(base64.urlsafe_b64encode(master) + b"\n")

    def start(self) -> None:
        """Start the daemon, and restart it whenever it ends."""
        self._keeper = asyncio.create_task(self._keep(), name=f"keeper of {self.home.name}")

    async def _keep(self) -> None:
        while True:
            number = await self._services.nursery.fork(home=str(self.home), cloud=self.http.url, **self.orders)
            self.starts += 1
            self.orders.pop("die_at", None)
            self._number = number
            try:
                self._pidfd = os.pidfd_open(number)
            except ProcessLookupError:
                continue  # it has ended already
            try:
                await self._ended(self._pidfd)
            finally:
                self.end()
                os.close(self._pidfd)
                self._pidfd = None
            await asyncio.sleep(0.02)

    async def _ended(self, pidfd: int) -> None:
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(pidfd, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(pidfd)

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to the daemon; return False if none runs."""
        if self._pidfd is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)
            return True
        return False

    def disk(self, *, full: bool) -> None:
        """Forbid the daemon's files to grow (`full`), or allow it again. The setting survives restarts of the daemon.

        The error differs from that of a full disk, but occurs at the same calls.
        """
        self.orders["full"] = full
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(self._number, resource.RLIMIT_FSIZE, (0 if full else -1, -1))

    def end(self) -> None:
        """Kill the process with SIGKILL."""
        self.signal(signal.SIGKILL)

    async def serves(self) -> None:
        """Wait until a live daemon has reported that it serves."""
        file = self.home / READY
        async with Within(SETTLE_S, f"{self.home} serves", self.status_message):
            while not (file.exists() and self._sits(int(file.read_text()))):  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(POLL_S)

    def _sits(self, number: int) -> bool:
        if self._pidfd is None:
            return False
        facts = Path(f"/proc/self/fdinfo/{self._pidfd}").read_text()
        return f"Pid:\t{number}\n" in facts

    def client(self) -> AsyncClient:
        """Return a client. Raises OSError before the first start."""
        document = json.loads((self.home / "client.json").read_text())
        return AsyncClient(document["url"], document["token"])

    async def leave(self) -> None:
        """Kill the daemon; only `start` starts it again."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def stop(self) -> None:
        await self.leave()
        await self.database.stop()
        await self.http.stop()

    def log(self) -> str:
        file = self.home / "daemon.log"
        return file.read_text()[-3000:] if file.exists() else ""

    def status_message(self) -> str:
        """Return a message with the state of the current process and its last log lines."""
        sits = "nobody sits here" if self._pidfd is None else f"process {self._number} sits here"
        return f"{self.starts} starts, {sits}; {self.gate.status_message()}\n{self.log()}"
