"""One installation of real daemons: a database, daemons that are restarted whenever they end, and jobs.

Used by tests of SIGKILL, SIGTERM, SIGSTOP, broken connections and full disks. Tests of decisions that need no process
use `tests.support.rig`, which is a hundred times faster.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from typing import Any, TypeVar

import asyncpg

from broker.client.async_client import AsyncClient
from broker.client.transport.errors import ApiError, DaemonUnreachable
from broker.domain.ids import INSTALLATION_LENGTH, Installation, base32
from broker.store.embedded.server import USER
from tests.crash.daemon import counting
from tests.crash.loopback_cloud import CloudBehaviour, SoldMachine, usd_for
from tests.crash.services import NO_ANSWER, TEMPLATE, SharedServices
from tests.crash.supervised_daemon import POLL_S, SETTLE_S, SupervisedDaemon
from tests.crash.waits import Within

CLOCK_S = 0.25
"""Seconds by which a broker's reading of the database's clock may be wrong."""
SWEEP_S = 300.0
"""Seconds within which a machine without an owner must be gone."""
LASTED = """
    SELECT id, GREATEST(absent_at, (SELECT max(at) FROM ledger WHERE attempt_id = attempts.id AND kind = 'adjustment'))
        - create_sent_at FROM attempts WHERE ended_at IS NOT NULL
"""
"""Durations of attempts from the rows alone, so that clocks of brokers and of the cloud are not compared."""
Answer = TypeVar("Answer")
RESTING = ("succeeded", "failed", "capped", "cancelled")


@dataclass(kw_only=True)
class Verdict:
    """Violations that an audit of a rig has found, each as a message."""

    lost_jobs: list[str] = field(default_factory=list)
    double_jobs: list[str] = field(default_factory=list)
    """Second jobs of a submission that was repeated because its first reply was lost."""
    double_live: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    underbilled: list[str] = field(default_factory=list)
    overbilled: list[str] = field(default_factory=list)

    @property
    def broken(self) -> list[str]:
        found = (self.lost_jobs, self.double_jobs, self.double_live, self.orphans, self.underbilled, self.overbilled)
        return [line for lines in found for line in lines]


class DaemonRig:
    """`async with DaemonRig(services, daemons=2) as rig:` runs real daemons until the end of the block."""

    def __init__(
        self, services: SharedServices, *, daemons: int = 1, template: str | None = TEMPLATE, new: bool = False
    ) -> None:
        """Prepare. `template`: database to copy; None: an empty one. `new`: no daemon ever ran in the home."""
        services.installations += 1
        self._template, self._new = template, new
        self.services = services
        self.database = f"installation_{services.installations}"
        self.installation = Installation(base32(secrets.token_bytes(5), INSTALLATION_LENGTH))
        self.folder = services.folder / self.database
        self.daemons = [SupervisedDaemon(services, self.folder / f"home{n}") for n in range(daemons)]
        self.acknowledged: list[str] = []
        self.ends: dict[str, str] = {}
        """Final state of the jobs that must not succeed, by job."""

    @property
    def daemon(self) -> SupervisedDaemon:
        return self.daemons[0]

    @property
    def behaviour(self) -> CloudBehaviour:
        """Return the cloud's behaviour towards this installation."""
        return self.services.cloud.behaviours[self.installation]

    async def __aenter__(self) -> "DaemonRig":
        await self._create_database()
        master = secrets.token_bytes(32)
        for daemon in self.daemons:
            await daemon.prepare(self.database, None if self._new else self.installation, master)
        return self

    async def __aexit__(self, *_: object) -> None:
        for daemon in self.daemons:
            await daemon.stop()
        await self.services.postgres_answers()
        await self._drop_database()

    async def _create_database(self) -> None:
        like = f" TEMPLATE {self._template}" if self._template else ""
        await self.services.administer(f"CREATE DATABASE {self.database}{like} OWNER {USER}")

    async def _drop_database(self) -> None:
        await self.services.administer(f"DROP DATABASE {self.database} WITH (FORCE)")

    async def restore(self) -> None:
        """Restore the database to its state before the first daemon's start."""
        await self._drop_database()
        await self._create_database()

    async def submit(self, **changes: Any) -> str:
        """Submit a job as a user does, with the same key at every try. `changes` apply to the spec."""
        (code, spec), key = counting(1), secrets.token_hex(8)

        async def sent(client: AsyncClient) -> str:
            upload = await client.upload(code, name="code.tar")
            spec["script"]["code"] = f"upload:{upload.sha256}"
            return str((await client.submit(spec | changes, key=key)).id)

        self.acknowledged.append(job := await self.called("submit", sent))
        return job

    async def called(self, what: str, call: Callable[[AsyncClient], Awaitable[Answer]]) -> Answer:
        """Repeat a call until it is answered, because a starting daemon does not answer."""
        daemon = self.daemon
        async with Within(SETTLE_S, f"{daemon.home} answers {what}", daemon.status_message):
            while True:
                with contextlib.suppress(OSError, ValueError, DaemonUnreachable, ApiError):
                    async with daemon.client() as client:
                        return await call(client)
                await asyncio.sleep(POLL_S)

    async def until(self, what: str, asked: str) -> None:
        """Wait until the query returns a row."""
        async with Within(SETTLE_S, what, self._trouble):
            while not await self.ask(asked):  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(POLL_S)

    async def rests(self, job: str) -> bool:
        """Return True if the job is terminal; False also while the database does not answer."""
        try:
            found = await self.ask(f"SELECT 1 FROM jobs WHERE id = '{job}' AND state IN {RESTING}")
        except NO_ANSWER:
            return False
        return bool(found)

    async def settle(self) -> Verdict:
        """Wait until every job is terminal, then audit the installation."""
        verdict = Verdict()
        if self._new:
            await self.daemon.serves()
            self.installation = Installation((self.daemon.home / "installation").read_text().strip())
        with contextlib.suppress(TimeoutError):
            await self._rest()
        jobs = dict(await self.ask("SELECT id, state FROM jobs"))
        verdict.lost_jobs += [
            f"job {job} is {jobs.get(job, 'unknown')}, not {self.ends.get(job, 'succeeded')}: {self._trouble()}"
            for job in self.acknowledged
            if jobs.get(job) != self.ends.get(job, "succeeded")
        ]
        verdict.double_jobs += [f"job {job} was asked for once only" for job in set(jobs) - set(self.acknowledged)]
        await self._swept(verdict)
        return await self.audited(verdict)

    async def _rest(self) -> None:
        async with asyncio.timeout(SETTLE_S):
            while True:
                counted = f"SELECT count(*) FROM jobs WHERE state NOT IN {RESTING}"
                if (await self.ask(counted))[0][0] == 0:
                    return
                await asyncio.sleep(POLL_S)

    async def _swept(self, verdict: Verdict) -> None:
        try:
            async with asyncio.timeout(SWEEP_S):
                while self.services.cloud.alive(self.installation):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            verdict.orphans += [f"{machine.id} stands" for machine in self.services.cloud.alive(self.installation)]

    async def charged(self) -> dict[str, Decimal]:
        """Return the charged dollars by attempt."""
        summed = "SELECT attempt_id, sum(usd) FROM ledger WHERE kind IN ('charge', 'adjustment') GROUP BY 1"
        return dict(await self.ask(summed))

    async def audited(self, verdict: Verdict | None = None) -> Verdict:
        """Compare the cloud's own log with the ledger."""
        verdict = verdict or Verdict()
        machines = self.services.cloud.of(self.installation)
        job_of = dict(await self.ask("SELECT id, job_id FROM attempts"))
        verdict.orphans += [f"{machine.id} is of no attempt" for machine in machines if machine.attempt not in job_of]
        verdict.double_live += overlapping(machines, job_of)
        await self._money(verdict)
        return verdict

    async def _money(self, verdict: Verdict) -> None:
        """Check each attempt's charges against the cloud's own bill and log, and against the longest time to charge.

        The least is the time from the first machine's birth to the moment at which a broker could first prove the last
        one's absence. The most begins at the row that announces the create. It ends at the recorded latest end of the
        machine, or at a later charge for a machine after that. Times are in whole seconds, as the cloud bills.
        """
        ledger = await self.charged()
        for attempt, billed in self.services.cloud.bill(self.installation).items():
            least, usd = max(billed, self._least_usd(attempt)), ledger.get(attempt, Decimal(0))
            if usd < least:
                verdict.underbilled.append(f"attempt {attempt}: ${usd} in the ledger, ${billed} billed, ${least} due")
        for attempt, seconds in await self.ask(LASTED):
            most = usd_for((seconds or timedelta(0)).total_seconds())
            if ledger.get(attempt, Decimal(0)) > most:
                verdict.overbilled.append(f"attempt {attempt}: ${ledger[attempt]} in the ledger, at most ${most} due")

    async def unpaid(self, late: SoldMachine, settled: Mapping[str, Decimal], *, less_s: float) -> list[str]:
        """Wait until a machine that came after its attempt's end is gone and charged, in addition to the attempts'
        charges. Otherwise return a message. `less_s`: allowed shortfall, where no process outlived the destruction."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SWEEP_S):
                while late.live(time.monotonic()):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
                due = settled[late.attempt] + usd_for(late.ended - late.born - CLOCK_S - less_s)
                while (await self.charged())[late.attempt] < due:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
                return []
        return [f"{late.id} came late, and stood from {late.born:.1f} to {late.ended:.1f} s, uncharged"]

    async def paid_before_birth(self, late: SoldMachine, settled: Mapping[str, Decimal]) -> list[str]:
        """Return a message about a charge for such a machine beyond the time since its birth."""
        found = await self.ask(f"SELECT charged_usd, charged_to FROM attempts WHERE id = '{late.attempt}'")
        usd, charged_to = found[0]
        most = settled[late.attempt] + usd_for((charged_to - late.born_at).total_seconds() + CLOCK_S)
        return [f"{late.id} came late, and ${usd} is charged, at most ${most} due"] if usd > most else []

    def _least_usd(self, attempt: str) -> Decimal:
        cloud = self.services.cloud
        proven_absent_at = cloud.proven_absent_at(self.installation, attempt)
        born = min(machine.born for machine in cloud.of(self.installation) if machine.attempt == attempt)
        return Decimal(0) if proven_absent_at is None else usd_for(proven_absent_at - born - CLOCK_S)

    async def ask(self, statement: str) -> list[tuple[Any, ...]]:
        async with Within(SETTLE_S, f"PostgreSQL answers {' '.join(statement.split())}", self._trouble):
            connection = await asyncpg.connect(self.services.dsn(self.database))
            try:
                return [tuple(row) for row in await connection.fetch(statement)]
            finally:
                await connection.close()

    def _trouble(self) -> str:
        return "\n".join(f"{daemon.home.name}: {daemon.status_message()}" for daemon in self.daemons)


def overlapping(machines: Sequence[SoldMachine], job_of: dict[str, str]) -> list[str]:
    """Return machines of one job that ran at the same time, except for late ones."""
    found, last = [], dict[str, SoldMachine]()
    for sold in sorted((machine for machine in machines if not machine.late), key=lambda machine: machine.born):
        job = job_of.get(sold.attempt, sold.attempt)
        before = last.get(job)
        if before is not None and sold.born < before.ended:
            found.append(f"{before.id} and {sold.id} of job {job}")
        last[job] = sold if before is None or sold.ended > before.ended else before
    return found
