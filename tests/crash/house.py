"""One installation: a database, one or more daemons that are started again whenever they end, and jobs to lose."""

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
from tests.crash.cloud import Stand, Ways, usd_for
from tests.crash.daemon import counting
from tests.crash.rig import NO_ANSWER, TEMPLATE, Rig
from tests.crash.seat import LOOK_S, SETTLE_S, Seat
from tests.crash.waits import Within

CLOCK_S = 0.25
"""By which a broker's reading of the database's clock may be wrong here."""
SWEEP_S = 300.0
"""Within which a machine that nobody answers for must be gone."""
LASTED = """
    SELECT id, GREATEST(absent_at, (SELECT max(at) FROM ledger WHERE attempt_id = attempts.id AND kind = 'adjustment'))
        - create_sent_at FROM attempts WHERE ended_at IS NOT NULL
"""
"""By the rows; one broker's reading of the one clock need not be held against another's, or against the cloud's."""
Answer = TypeVar("Answer")
RESTING = ("succeeded", "failed", "capped", "cancelled")


@dataclass(kw_only=True)
class Verdict:
    """What a house has come to, each item in words."""

    lost_jobs: list[str] = field(default_factory=list)
    double_jobs: list[str] = field(default_factory=list)
    """Made by a submission that was sent again because nobody had heard of the first one."""
    double_live: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    underbilled: list[str] = field(default_factory=list)
    overbilled: list[str] = field(default_factory=list)

    @property
    def broken(self) -> list[str]:
        found = (self.lost_jobs, self.double_jobs, self.double_live, self.orphans, self.underbilled, self.overbilled)
        return [line for lines in found for line in lines]


class House:
    """`async with House(rig, seats=2) as house:` its daemons run until the end of the block."""

    def __init__(self, rig: Rig, *, seats: int = 1, template: str | None = TEMPLATE, new: bool = False) -> None:
        """`template` None: an empty database. `new`: no daemon ever was in the home."""
        rig.houses += 1
        self._template, self._new = template, new
        self.rig = rig
        self.database = f"house_{rig.houses}"
        self.installation = Installation(base32(secrets.token_bytes(5), INSTALLATION_LENGTH))
        self.folder = rig.folder / self.database
        self.seats = [Seat(rig, self.folder / f"home{n}") for n in range(seats)]
        self.acknowledged: list[str] = []
        self.ends: dict[str, str] = {}
        """By job: how it has to end, where it must not succeed."""

    @property
    def seat(self) -> Seat:
        return self.seats[0]

    @property
    def ways(self) -> Ways:
        """Of the cloud, with this house."""
        return self.rig.cloud.ways[self.installation]

    async def __aenter__(self) -> "House":
        await self._create_database()
        master = secrets.token_bytes(32)
        for seat in self.seats:
            await seat.prepare(self.database, None if self._new else self.installation, master)
        return self

    async def __aexit__(self, *_: object) -> None:
        for seat in self.seats:
            await seat.stop()
        await self.rig.postgres_answers()
        await self._drop_database()

    async def _create_database(self) -> None:
        like = f" TEMPLATE {self._template}" if self._template else ""
        await self.rig.administer(f"CREATE DATABASE {self.database}{like}")

    async def _drop_database(self) -> None:
        await self.rig.administer(f"DROP DATABASE {self.database} WITH (FORCE)")

    async def restore(self) -> None:
        """The database is again as it was before the first daemon's start."""
        await self._drop_database()
        await self._create_database()

    async def submit(self, **changes: Any) -> str:
        """As people do it, with the same key. `changes` of the spec."""
        (code, spec), key = counting(1), secrets.token_hex(8)

        async def sent(client: AsyncClient) -> str:
            upload = await client.upload(code, name="code.tar")
            spec["script"]["code"] = f"upload:{upload.sha256}"
            return str((await client.submit(spec | changes, key=key)).id)

        self.acknowledged.append(job := await self.called("submit", sent))
        return job

    async def called(self, what: str, call: Callable[[AsyncClient], Awaitable[Answer]]) -> Answer:
        """Again and again until it is answered, since nobody answers while a daemon is being started."""
        seat = self.seat
        async with Within(SETTLE_S, f"{seat.home} answers {what}", seat.told):
            while True:
                with contextlib.suppress(OSError, ValueError, DaemonUnreachable, ApiError):
                    async with seat.client() as client:
                        return await call(client)
                await asyncio.sleep(LOOK_S)

    async def until(self, what: str, asked: str) -> None:
        """Waits until this has a row."""
        async with Within(SETTLE_S, what, self._trouble):
            while not await self.ask(asked):  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(LOOK_S)

    async def rests(self, job: str) -> bool:
        """False also while the database does not answer."""
        try:
            found = await self.ask(f"SELECT 1 FROM jobs WHERE id = '{job}' AND state IN {RESTING}")
        except NO_ANSWER:
            return False
        return bool(found)

    async def settle(self) -> Verdict:
        """Waits until every job rests, and looks at what is left."""
        verdict = Verdict()
        if self._new:
            await self.seat.serves()
            self.installation = Installation((self.seat.home / "installation").read_text().strip())
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
                await asyncio.sleep(LOOK_S)

    async def _swept(self, verdict: Verdict) -> None:
        try:
            async with asyncio.timeout(SWEEP_S):
                while self.rig.cloud.alive(self.installation):  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            verdict.orphans += [f"{one.id} stands" for one in self.rig.cloud.alive(self.installation)]

    async def charged(self) -> dict[str, Decimal]:
        """Dollars by attempt."""
        summed = "SELECT attempt_id, sum(usd) FROM ledger WHERE kind IN ('charge', 'adjustment') GROUP BY 1"
        return dict(await self.ask(summed))

    async def audited(self, verdict: Verdict | None = None) -> Verdict:
        """The cloud's own log against the ledger."""
        verdict = verdict or Verdict()
        stands = self.rig.cloud.of(self.installation)
        job_of = dict(await self.ask("SELECT id, job_id FROM attempts"))
        verdict.orphans += [f"{one.id} is of no attempt" for one in stands if one.attempt not in job_of]
        verdict.double_live += together(stands, job_of)
        await self._money(verdict)
        return verdict

    async def _money(self, verdict: Verdict) -> None:
        """Each attempt's charges against the cloud's own bill and log, and against the longest that it may be charged.

        At least: from the first machine's birth to when a broker could first know that the last one is gone. At most:
        from the row that announces the create to the moment up to which the attempt's machine may have stood, as it was
        written when its absence was proven, or to the charge for what stood after that. In whole seconds, as the cloud
        bills.
        """
        ledger = await self.charged()
        for attempt, billed in self.rig.cloud.bill(self.installation).items():
            least, usd = max(billed, self._least_usd(attempt)), ledger.get(attempt, Decimal(0))
            if usd < least:
                verdict.underbilled.append(f"attempt {attempt}: ${usd} in the ledger, ${billed} billed, ${least} due")
        for attempt, seconds in await self.ask(LASTED):
            most = usd_for((seconds or timedelta(0)).total_seconds())
            if ledger.get(attempt, Decimal(0)) > most:
                verdict.overbilled.append(f"attempt {attempt}: ${ledger[attempt]} in the ledger, at most ${most} due")

    async def unpaid(self, late: Stand, settled: Mapping[str, Decimal], *, less_s: float) -> list[str]:
        """Waits until a machine that came after its attempt's end is gone and charged, on top of what the attempts had
        come to; else says so. `less_s`: by which it may be short, where nobody outlived the destruction."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SWEEP_S):
                while late.live(time.monotonic()):  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
                due = settled[late.attempt] + usd_for(late.ended - late.born - CLOCK_S - less_s)
                while (await self.charged())[late.attempt] < due:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
                return []
        return [f"{late.id} came late, and stood from {late.born:.1f} to {late.ended:.1f} s, uncharged"]

    async def paid_before_birth(self, late: Stand, settled: Mapping[str, Decimal]) -> list[str]:
        """What is charged for such a machine beyond the time from its birth, in words."""
        found = await self.ask(f"SELECT charged_usd, charged_to FROM attempts WHERE id = '{late.attempt}'")
        usd, charged_to = found[0]
        most = settled[late.attempt] + usd_for((charged_to - late.born_at).total_seconds() + CLOCK_S)
        return [f"{late.id} came late, and ${usd} is charged, at most ${most} due"] if usd > most else []

    def _least_usd(self, attempt: str) -> Decimal:
        cloud = self.rig.cloud
        unlisted = cloud.unlisted(self.installation, attempt)
        born = min(one.born for one in cloud.of(self.installation) if one.attempt == attempt)
        return Decimal(0) if unlisted is None else usd_for(unlisted - born - CLOCK_S)

    async def ask(self, statement: str) -> list[tuple[Any, ...]]:
        async with Within(SETTLE_S, f"PostgreSQL answers {' '.join(statement.split())}", self._trouble):
            connection = await asyncpg.connect(self.rig.dsn(self.database))
            try:
                return [tuple(row) for row in await connection.fetch(statement)]
            finally:
                await connection.close()

    def _trouble(self) -> str:
        return "\n".join(f"{seat.home.name}: {seat.told()}" for seat in self.seats)


def together(stands: Sequence[Stand], job_of: dict[str, str]) -> list[str]:
    """Machines of one job that stood at the same time, but for those that came late."""
    found, last = [], dict[str, Stand]()
    for stand in sorted((one for one in stands if not one.late), key=lambda one: one.born):
        job = job_of.get(stand.attempt, stand.attempt)
        before = last.get(job)
        if before is not None and stand.born < before.ended:
            found.append(f"{before.id} and {stand.id} of job {job}")
        last[job] = stand if before is None or stand.ended > before.ended else before
    return found
