"""Scenes that kill daemons, their database or their connections. The installation must survive each scene."""

import asyncio
import random
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.crash.checkpoints import CrashCounts
from tests.crash.daemon_rig import DaemonRig, Verdict
from tests.crash.gate import Point, bare
from tests.crash.lives import LIVES, bought_twice, deviations, life_of, not_left
from tests.crash.nursery import LEASE_S
from tests.crash.services import SharedServices
from tests.crash.supervised_daemon import POLL_S

OFTEN = ("commit:claim_", "commit:forget", "blob:get", "blob:list", "blob:head", "cloud:list", "cloud:offers")
"""Passages that repeat all the time and whose loss changes no state. Only the first of each name is a point."""
ALIKE = ("commit:drop_deliveries", "blob:put broker", "blob:delete")
"""Passages that are the same in every life, and therefore points of the plain life only."""
TRIES = 5
"""Maximum number of tries of an undisturbed life, which may take another course if the host pauses for seconds."""
PASSAGES = 3
"""Number of passages of each other name that are points of a life."""
ROUND = 10
"""Kills in one installation before it is audited."""
JOBS = 3
"""Number of concurrent jobs during random kills."""

LogLine = Callable[[str], None]


@dataclass(kw_only=True)
class Totals:
    """Counts over a run, and messages for the reader in `broken`."""

    kills: int = 0
    lost_jobs: int = 0
    double_jobs: int = 0
    double_live: int = 0
    orphans: int = 0
    underbilled: int = 0
    overbilled: int = 0
    torn_loads: int = 0
    torn_commits: int = 0
    without_a_good_one: int = 0
    missed: int = 0
    """Number of points that their life did not reach."""
    jobs: int = 0
    broken: list[str] = field(default_factory=list)
    passed_by: list[str] = field(default_factory=list)
    """Points that were missed, with their lives' names."""

    def miss(self, point: str) -> None:
        self.missed += 1
        self.passed_by.append(point)

    def add_checkpoints(self, found: CrashCounts) -> None:
        self.kills += found.kills
        self.torn_loads += found.torn_loads
        self.torn_commits += found.torn_commits
        self.without_a_good_one += found.without_a_good_one
        self.missed += len(found.missed)
        self.broken += found.broken

    def add(self, rig: DaemonRig, verdict: Verdict, kills: int) -> None:
        self.kills += kills
        self.jobs += len(rig.acknowledged)
        self.lost_jobs += len(verdict.lost_jobs)
        self.double_jobs += len(verdict.double_jobs)
        self.double_live += len(verdict.double_live)
        self.orphans += len(verdict.orphans)
        self.underbilled += len(verdict.underbilled)
        self.overbilled += len(verdict.overbilled)
        self.broken += verdict.broken

    def report(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}


# -------------------------------------------------------------------------------------------------------------- points


async def enumerate_points(services: SharedServices, name: str = "") -> list[Point]:
    """Return every passage of an undisturbed life, from the daemon's first start to its jobs' end, at both moments. A
    life other than the plain one adds only the passages of its own part."""
    for _ in range(TRIES):
        async with DaemonRig(services) as rig:
            rig.daemon.start()
            await LIVES[name].act(rig)
            verdict = await rig.settle()
            assert not verdict.broken, (name, verdict.broken)
            trouble = await deviations(rig, name) if name else []
        if not trouble:
            return [
                Point(name=passage.name, number=passage.number, moment=moment)
                for passage in _chosen(rig.daemon.gate.passages, name)
                for moment in ("before", "after")
            ]
    raise AssertionError(f"{name} is not what it is to be, {TRIES} times: {trouble}")


def _chosen(passages: Sequence[Point], name: str) -> list[Point]:
    passed = [point for point in passages if life_of(point) == name]
    if not name:
        return [point for point in passed if point.number <= (1 if point.name.startswith(OFTEN) else PASSAGES)]
    names = [bare(point.name) for point in passed]
    until = LIVES[name].until
    own = passed[: names.index(until) + 1 if until in names else len(names)]
    return [point for point in own if point.number == 1 and not bare(point.name).startswith((*OFTEN, *ALIKE))]


async def kill_at(services: SharedServices, point: Point, totals: Totals) -> None:
    """Run one life that is killed at that point."""
    async with DaemonRig(services) as rig:
        gate = rig.daemon.gate
        gate.kill_at = point
        rig.daemon.start()
        stuck = []
        try:
            await LIVES[life_of(point)].act(rig)
        except TimeoutError as e:
            stuck.append(str(e))
        verdict = await rig.settle()
        verdict.lost_jobs += [*stuck, *await not_left(rig, life_of(point))]
        verdict.double_live += bought_twice(rig) if life_of(point) else []
        totals.add(rig, verdict, gate.killed)
        if not gate.killed:
            totals.miss(str(point))


def sampled(points: Sequence[Point], commit: str, share: int, seed: int = 0) -> list[Point]:
    """Return every `share`-th point. Commit and seed choose the first one, so that many commits cover all points."""
    return list(points[(int(commit, 16) + seed) % share :: share])


def commit() -> str:
    """Return the hash of the commit that is checked out; 0 without a repository."""
    head = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=False)
    return head.stdout.strip() or "0"


# -------------------------------------------------------------------------------------------------------------- random


class Flow:
    """Stream of submitted jobs while the block lasts, with a fixed number in progress."""

    def __init__(self, rig: DaemonRig) -> None:
        self._rig = rig
        self._tasks: list[asyncio.Task[None]] = []
        self._over = False

    async def __aenter__(self) -> "Flow":
        self._tasks = [asyncio.create_task(self._run()) for _ in range(JOBS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)

    async def _run(self) -> None:
        while not self._over:
            job = await self._rig.submit()
            while not self._over and not await self._rig.rests(job):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)


async def killed_at_random(
    services: SharedServices, kills: int, seed: int, totals: Totals, *, cuts: float = 0.0
) -> None:
    """Kill the daemon at random times, also during a start. `cuts`: share of passages that are refused meanwhile."""
    draw = random.Random(f"random/{seed}")
    async with DaemonRig(services) as rig:
        daemon = rig.daemon
        daemon.gate.draw = draw
        daemon.start()
        await daemon.serves()
        daemon.gate.cuts = cuts
        done = 0
        async with Flow(rig):
            while done < kills:
                await asyncio.sleep(draw.uniform(0, 2.0))
                if draw.random() < 0.3:
                    daemon.database.cut()
                done += daemon.signal(signal.SIGKILL)
        daemon.gate.cuts = 0.0
        totals.add(rig, await rig.settle(), done)


async def cut_at_random(services: SharedServices, rounds: int, seed: int, totals: Totals) -> None:
    """Break connections at random times, also in the middle of a commit, without a kill."""
    draw = random.Random(f"cuts/{seed}")
    async with DaemonRig(services) as rig:
        daemon = rig.daemon
        daemon.gate.draw, daemon.gate.cuts = draw, 0.02
        daemon.start()
        async with Flow(rig):
            for _ in range(rounds):
                await asyncio.sleep(draw.uniform(0, 1.0))
                daemon.database.cut()
        daemon.gate.cuts = 0.0
        totals.add(rig, await rig.settle(), 0)


# ------------------------------------------------------------------------------------------------------- the database


async def postgres_killed(services: SharedServices, kills: int, seed: int, totals: Totals) -> None:
    """Kill the postmaster and its backends with SIGKILL. The daemon must recover by itself."""
    draw = random.Random(f"postgres/{seed}")
    async with DaemonRig(services) as rig:
        rig.daemon.start()
        await rig.daemon.serves()
        async with Flow(rig):
            for _ in range(kills):
                await asyncio.sleep(draw.uniform(0, 1.5))
                await services.kill_postgres()
                await services.postgres_answers()
        totals.add(rig, await rig.settle(), kills)


# -------------------------------------------------------------------------------------------------------------- fights


async def fought(services: SharedServices, fights: int, seed: int, totals: Totals) -> None:
    """Freeze one of two brokers until the other one holds all its leases, then let it continue.

    In every third round the other broker is killed meanwhile.
    """
    draw = random.Random(f"fights/{seed}")
    async with DaemonRig(services, daemons=2) as rig:
        for daemon in rig.daemons:
            daemon.start()
        for daemon in rig.daemons:
            await daemon.serves()
        stops = 0
        async with Flow(rig):
            for number in range(fights):
                await asyncio.sleep(draw.uniform(0, 0.7))
                first, second = draw.sample(rig.daemons, 2)
                await first.serves()
                first.signal(signal.SIGSTOP)
                stops += 1
                await asyncio.sleep(LEASE_S * draw.uniform(1.05, 1.5))
                if number % 3 == 2:
                    second.signal(signal.SIGKILL)
                first.signal(signal.SIGCONT)
        totals.add(rig, await rig.settle(), stops)
