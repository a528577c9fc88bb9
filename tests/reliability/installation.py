"""A daemon with one running job, and the checks after a fault."""

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import asyncpg
import psutil

from broker.api.schemas.jobs import JobDetail
from broker.client.transport.errors import ClientError
from broker.store.embedded.server import EmbeddedPostgres
from tests.crash.daemon import Daemon, submit
from tests.crash.waits import Within
from tests.reliability.figures import Figures

COUNT = 60
"""Tenths of a second that the job runs."""
WAIT_S = 90.0
"""Longest wait for one change. The figures show how long it took."""
POLL_S = 0.1
LOG_S = 30.0
ENDED = {"succeeded", "failed", "capped", "cancelled"}
COUNTED = re.compile(r"^count (\d+)$", re.MULTILINE)
GATEWAY_S = 20.0
"""Allowance for the clock readings and the charges between two looks."""


class Installation:
    """A running daemon and the job that a fault must not harm."""

    def __init__(self, daemon: Daemon, figures: Figures) -> None:
        self.daemon, self.figures = daemon, figures
        self.job = ""
        self._began_at, self._began_s = datetime.now(UTC), time.monotonic()

    @property
    def process(self) -> psutil.Process:
        assert self.daemon.process is not None
        return psutil.Process(self.daemon.process.pid)

    def postgres(self) -> list[psutil.Process]:
        """Return the processes of the embedded database, the first one first."""
        children = self.process.children(recursive=True)
        return [child for child in children if child.name() == "postgres"]

    async def submit(self, to: int = COUNT) -> str:
        async with self.daemon.client() as client:
            return await submit(client, to)

    async def detail(self, job: str = "") -> JobDetail:
        async with self.daemon.client() as client:
            return await client.job(job or self.job)

    async def trains(self) -> None:
        """Submit the job, and wait until its program has a checkpoint."""
        self.job = await self.submit()
        detail: JobDetail | None = None
        async with Within(WAIT_S, "the job trains", lambda: f"{detail}\n{self.log()}"):
            while not (detail and any(run.beat and run.beat.checkpoint for run in detail.runs)):
                await asyncio.sleep(POLL_S)
                detail = await self.detail()

    async def checks(self) -> dict[str, str]:
        """Return the state of each part of `/readyz`."""
        async with self.daemon.client() as client:
            return dict((await client.ready()).checks)

    async def unready(self, part: str, words: str) -> str:
        """Wait until `/readyz` names the fault, and note the seconds that it took. Return its message."""
        return await self._wait(f"unready_s_{part}", lambda checks: words in checks.get(part, ""), part)

    async def ready(self) -> None:
        """Wait until all parts work again."""
        await self._wait("ready_again_s", lambda checks: set(checks.values()) == {"ok"}, "")

    async def _wait(self, name: str, holds: Callable[[dict[str, str]], bool], part: str) -> str:
        began, checks = time.monotonic(), dict[str, str]()
        async with Within(WAIT_S, name, lambda: f"{checks}\n{self.log()}"):
            while not holds(checks):
                await asyncio.sleep(POLL_S)
                assert self.is_alive(), self.log()
                with suppress(ClientError):
                    checks = await self.checks()
        self.figures.note(name, time.monotonic() - began)
        return checks.get(part, "")

    def log(self) -> str:
        """Return the last lines of the log, without calls."""
        text = (self.daemon.home / "daemon.log").read_text()
        return "\n".join([line for line in text.splitlines() if "gpubroker.access" not in line][-20:])

    def is_alive(self) -> bool:
        return self.daemon.process is not None and self.daemon.process.returncode is None

    async def query(self, statement: str) -> list[tuple[Any, ...]]:
        connection = await asyncpg.connect(EmbeddedPostgres.dsn_of(self.daemon.home / "postgres"))
        try:
            return [tuple(row) for row in await connection.fetch(statement)]
        finally:
            await connection.close()

    async def ended(self) -> JobDetail:
        """Wait until the job has ended."""
        detail: JobDetail | None = None
        async with Within(WAIT_S, "the job ends", lambda: f"{detail}\n{self.log()}"):
            while True:
                with suppress(ClientError):
                    detail = await self.detail()
                    if detail.state in ENDED:
                        return detail
                await asyncio.sleep(POLL_S)

    async def ends_well(self, attempts: int = 1, *, log_is_whole: bool = True) -> None:
        """Wait until the job has succeeded. Its count, attempts, charges and ledger must be right.

        `log_is_whole` False: lines are lost that the agent wrote into another store, but neither order nor end.
        """
        detail = await self.ended()
        assert (detail.state, len(detail.runs)) == ("succeeded", attempts), (detail.reason, self.log())
        counted: list[int] = []
        async with Within(LOG_S, "the log is complete", lambda: f"{counted}"), self.daemon.client() as client:
            while counted != list(range(1, COUNT + 1)) and (log_is_whole or counted[-1:] != [COUNT]):
                counted = [int(number) for number in COUNTED.findall(await client.log_now(self.job))]
                await asyncio.sleep(POLL_S)
        assert counted == sorted(set(counted)), counted
        lasted_s = time.monotonic() - self._began_s
        most = sum((run.usd_per_hour or Decimal(0) for run in detail.runs), Decimal(0)) * Decimal(lasted_s) / 3600
        assert 0 < detail.spent_usd <= most, f"${detail.spent_usd} charged, at most ${most} are due"
        await self._ledger(lasted_s)
        await self.daemon.stop()
        assert self.daemon.processes() == []

    async def _ledger(self, lasted_s: float) -> None:
        """Check that no entry of the ledger has a time outside of the scenario."""
        margin = timedelta(seconds=GATEWAY_S)
        wrong = [
            at
            for (at,) in await self.query("SELECT at FROM ledger")
            if not self._began_at - margin <= at <= self._began_at + timedelta(seconds=lasted_s) + margin
        ]
        assert wrong == []


@asynccontextmanager
async def installation(
    figures: Figures, *, command: Sequence[str] = (), prepare: Callable[[Path], None] | None = None
) -> AsyncIterator[Installation]:
    """Start a daemon and its job. `command`: words before those that start the daemon. `prepare` changes its home."""
    daemon = Daemon(boot_s=0.2)
    daemon.command = (*command, sys.executable, "-m", "broker.cli")
    if prepare is not None:
        prepare(daemon.home)
    try:
        await daemon.start()
        running = Installation(daemon, figures)
        await running.trains()
        yield running
    finally:
        await daemon.remove()


async def refused_start(daemon: Daemon) -> str:
    """Start a daemon that must end by itself within WAIT_S. Return its last line."""
    (daemon.home / "daemon.log").write_text("")
    log = (daemon.home / "daemon.log").open("ab")
    daemon.process = await asyncio.create_subprocess_exec(
        *daemon.command, "serve", "--home", str(daemon.home), stdout=log, stderr=log
    )
    async with Within(WAIT_S, "the daemon refuses to start", daemon.log):
        code = await daemon.process.wait()
    assert code != 0
    assert "Traceback" not in daemon.log(), daemon.log()
    return daemon.log().strip().splitlines()[-1]


async def settled(actions: Sequence[Awaitable[Any]]) -> list[Any]:
    """Await all, and return results and exceptions."""
    return list(await asyncio.gather(*actions, return_exceptions=True))
