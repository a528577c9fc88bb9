"""Kills machines while they save, restore or prune. The next machine must find exactly the committed checkpoints."""

import asyncio
import fcntl
import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from broker.blobs import GrantSettings, ObstoreBlobs
from broker.domain.ids import Installation
from broker.lifecycle.recovery import furthest_first
from tests.crash.gate import Gate, Point
from tests.crash.proxy import HttpProxy
from tests.crash.services import BUCKET, ENDPOINT, KEYS, Nursery, blob_store, nursery_of
from tests.crash.trainee import GO, LOCK, TOLD, Order
from tests.crash.waits import Within
from trainer.contract import object_keys as keys

StoreKind = Literal["folder", "s3"]
STORES: tuple[StoreKind, ...] = ("folder", "s3")
INSTALLATION = Installation("aaaaaaaa")
JOB = "job"
SAVES = 4
"""Saves of an uninterrupted life; the third prunes."""
RANDOM_SAVES = 1_000
"""Saves of a life that is ended at a random time."""
PASSAGES = 3
"""Number of passages of each step that are points."""
RANDOM_S = 0.3
"""Longest time until a random kill: about ten saves in a folder, two in an S3."""
ROUND = 10
"""Kills of one job."""
LIFE_S = 300.0
"""Timeout of a life, far above its duration."""
POLL_S = 0.002


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A planned end of a life: at a point, or `after_s` seconds after its worker's start."""

    point: Point | None = None
    after_s: float = 0.0
    worker_only: bool = False
    """True: the worker dies, and its agent uploads the complete snapshots. False: both die, as with a machine."""

    def __str__(self) -> str:
        who = "the worker" if self.worker_only else "the machine"
        return f"{who}, {self.point or f'after {self.after_s:.3f} s'}"


@dataclass(kw_only=True)
class CrashCounts:
    """Counts over a run."""

    kills: int = 0
    torn_loads: int = 0
    """Restored states that differ from the state of their step."""
    torn_commits: int = 0
    """Committed checkpoints that a restore could not use."""
    without_a_good_one: int = 0
    """Restores that found only checkpoints older than the last reported commit."""
    missed: list[str] = field(default_factory=list)
    """Points that no life reached."""
    broken: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Bench:
    """Resources that all jobs share: an S3, and a nursery of machines."""

    nursery: Nursery
    moto: str
    turn: asyncio.Lock
    folder: Path
    jobs: int = 0


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    folder = Path(tempfile.mkdtemp(prefix="gb-"))
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        moto = await stack.enter_async_context(blob_store())
        nursery = await stack.enter_async_context(nursery_of("tests.crash.trainee"))
        yield Bench(nursery=nursery, moto=moto, turn=asyncio.Lock(), folder=folder)


class Saved:
    """Checkpoints of one job in its own store, and the job's successive machines."""

    def __init__(self, bench: Bench, store: StoreKind, found: CrashCounts) -> None:
        bench.jobs += 1
        self._bench, self._kind, self._found = bench, store, found
        self._folder = bench.folder / f"job{bench.jobs}"
        self._installation = Installation(f"{INSTALLATION[:5]}{bench.jobs:03d}")
        self._machines = self._attempts = 0
        self.store = self._folder / "store"
        self.store.mkdir(parents=True, exist_ok=True)
        """Path of the store, if the store is a folder."""
        self.told_step = 0
        """Step of the furthest checkpoint that was reported as committed."""

    async def life(self, kill: Kill | None, *, hurry: bool = False, again: bool = False) -> list[dict[str, Any]]:
        """Run a machine from its start to its end; return its reports. `again`: it belongs to the attempt before it,
        like a container that restarts. Otherwise it belongs to the next attempt, and the broker selects the checkpoints
        to resume from."""
        self._machines += 1
        self._attempts += not (again and self._attempts)
        folder = self._folder / f"machine{self._machines}"
        folder.mkdir(parents=True)
        gate = Gate()
        proxy = HttpProxy(gate, "", self._bench.moto, self._bench.turn)
        await proxy.start()
        try:
            order = await self._order(folder, proxy.url, kill, hurry)
            number = await self._bench.nursery.fork(**asdict(order))
            killed = await self._watched(number, folder, kill, gate)
        finally:
            await proxy.stop()
        reports = [json.loads(line) for line in (folder / TOLD).read_text().splitlines()]
        passed = {
            Point(name=report["passed"], number=report["number"], moment="before")
            for report in reports
            if "passed" in report
        }
        reports += [{"passed": p.name, "number": p.number} for p in gate.passages if p not in passed]
        self._judge(reports, kill)
        killed = killed or any("killed" in report for report in reports)
        self._found.kills += killed
        if kill is not None and not killed:
            self._found.missed.append(f"{self._kind}: {kill}")
        shutil.rmtree(folder)
        return reports

    async def _order(self, folder: Path, url: str, kill: Kill | None, hurry: bool) -> Order:
        here = self._kind == "folder"
        blobs = self.store.as_uri() if here else f"s3://{BUCKET}"
        options = {} if here else KEYS | {ENDPOINT: url}
        point = kill.point if kill else None
        return Order(
            folder=str(folder), blobs=blobs, options=options, installation=self._installation, job=JOB,
            attempt=f"a{self._attempts:03d}", resume_from=await self._resume_from(),
            saves=SAVES if kill is None or point else RANDOM_SAVES, hurry=hurry, large=not here and not hurry,
            kill=(point.name, point.number, point.moment) if point else None,
            worker_only=kill is not None and kill.worker_only,
        )  # fmt: skip

    async def _resume_from(self) -> tuple[str, ...]:
        """Return the checkpoints to resume from, as the broker selects them (`controllers.placement`)."""
        if self._kind == "folder":
            url, options = self.store.as_uri(), {}
            self.store.mkdir(parents=True, exist_ok=True)
        else:
            url, options = f"s3://{BUCKET}", KEYS | {ENDPOINT: self._bench.moto}
        blobs = ObstoreBlobs.open(url, self._installation, options=options, grants=GrantSettings(scope=False))
        async with self._bench.turn:
            listed = await blobs.list(keys.checkpoints(JOB))
        return furthest_first([blob.key for blob in listed])

    async def _watched(self, number: int, folder: Path, kill: Kill | None, gate: Gate) -> bool:
        """Wait until no process of the machine runs; return True if it was killed from here."""
        try:
            pidfd = os.pidfd_open(number)
        except ProcessLookupError:
            pidfd = -1
        else:
            if kill is not None and kill.point and kill.point.name.startswith("blob:"):
                gate.kill_at, gate.end = kill.point, lambda: signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            (folder / GO).touch()
            try:
                if kill is not None and kill.point is None:
                    async with Within(LIFE_S, f"the worker began ({kill})", lambda: _last(folder)):
                        await self._end_at(kill, pidfd, folder)
                async with Within(LIFE_S, f"the machine ended ({kill})", lambda: _last(folder)):
                    await _ended(pidfd)
            finally:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)
        await _free(folder / LOCK)
        return bool(gate.killed) or (kill is not None and kill.point is None)

    async def _end_at(self, kill: Kill, pidfd: int, folder: Path) -> None:
        while not (folder / LOCK).exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(kill.after_s)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _judge(self, reports: Sequence[dict[str, Any]], kill: Kill | None) -> None:
        found, where = self._found, f"{self._kind}, machine {self._machines}"
        for report in reports:
            if "passed_over" in report:
                found.torn_commits += 1
                found.broken.append(f"{where}: {report['passed_over']}")
            elif "restored" in report and not report["whole"]:
                found.torn_loads += 1
                found.broken.append(f"{where}: step {report['restored']} is not what was saved")
            elif "restored" in report and report["restored"] < self.told_step:
                found.without_a_good_one += 1
                found.broken.append(f"{where}: step {report['restored']}, and {self.told_step} was committed")
            self.told_step = max(self.told_step, report.get("committed", 0))
        if not any("ended" in report for report in reports) and (kill is None or kill.worker_only):
            found.broken.append(f"{where}: its agent did not come to its end ({kill})")


def _last(folder: Path) -> str:
    """Return the last lines that a machine reported."""
    file = folder / TOLD
    return file.read_text()[-1000:] if file.exists() else ""


async def _ended(pidfd: int) -> None:
    over, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(pidfd, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(pidfd)


async def _free(lock: Path) -> None:
    """Wait until the worker is dead and the kernel has released its lock."""
    if not lock.exists():
        return
    with lock.open() as file:
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                await asyncio.sleep(POLL_S)


# -------------------------------------------------------------------------------------------------------------- scenes


async def enumerate_points(bench: Bench, store: StoreKind) -> list[Kill]:
    """Return the points before and after every step of two lives, of which the second one restores.

    In an S3 the steps are its requests. In a folder they are calls of the trainer's functions. Each is killed twice:
    the machine, and the worker alone.
    """
    found = CrashCounts()
    saved = Saved(bench, store, found)
    reports = [report for _ in range(2) for report in await saved.life(None)]
    assert not found.broken, found.broken
    passed = sorted(
        {(report["passed"], report["number"]) for report in reports if report.get("number", PASSAGES + 1) <= PASSAGES}
    )
    points = [Point(name=n, number=i, moment=moment) for n, i in passed for moment in ("before", "after")]
    if store == "s3":
        return [Kill(point=point) for point in points if point.name.startswith("blob:")]
    return [Kill(point=point, worker_only=alone) for point in points for alone in (False, True)]


async def killed_at(bench: Bench, store: StoreKind, kills: Sequence[Kill], seed: int, found: CrashCounts) -> None:
    """Run one job through all kills. Each machine restores the previous one's checkpoint.

    Every third machine belongs to the previous attempt. Machines that are killed at a random time save without pauses.
    """
    draw = random.Random(f"checkpoints/{seed}")
    saved = Saved(bench, store, found)
    await saved.life(None)
    for kill in kills:
        await saved.life(kill, hurry=kill.point is None, again=draw.random() < 1 / 3)
    reports = await saved.life(None)
    assert any("restored" in report for report in reports), reports


def drawn(points: Sequence[Kill], count: int, seed: int) -> list[Kill]:
    """Draw kills that alternate between a point and a random time. Each point is drawn once before any is repeated."""
    draw = random.Random(f"kills/{seed}")
    order: list[Kill] = []
    while 2 * len(order) < count:
        order += draw.sample(points, len(points))
    at_random = (Kill(after_s=draw.uniform(0, RANDOM_S)) for _ in range(count))
    return [kill for pair in zip(order, at_random, strict=False) for kill in pair][:count]


async def carry_out(count: int, seed: int, log_line: Callable[[str], None]) -> CrashCounts:
    """Carry out `count` kills, alternately in a folder and in an S3."""
    found = CrashCounts()
    async with bench() as shared:
        points = {store: await enumerate_points(shared, store) for store in STORES}
        log_line(f"steps of a save, a restore and a prune: {', '.join(f'{len(points[s])} in a {s}' for s in STORES)}")
        kills = {store: iter(drawn(points[store], count, seed)) for store in STORES}
        turn = 0
        while found.kills < count and not found.broken:
            store = STORES[turn % len(STORES)]
            part = list(islice(kills[store], min(ROUND, count - found.kills)))
            await killed_at(shared, store, part, seed * 1_000_000 + turn, found)
            turn += 1
            log_line(f"{found.kills} kills, {len(found.broken)} broken")
        log_line("".join(f"did not come by: {point}\n" for point in found.missed))
    return found
