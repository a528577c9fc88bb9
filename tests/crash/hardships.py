"""Interruptions other than kills at a passage: kills at a file or in a migration, SIGTERM, a freeze, a full disk."""

import asyncio
import random
import re
import signal
from collections.abc import Sequence
from decimal import Decimal

from tests.crash.daemon_rig import DaemonRig
from tests.crash.gate import Moment, Point
from tests.crash.nursery import LEASE_S, watched
from tests.crash.scenes import Flow, Totals
from tests.crash.services import SharedServices
from tests.crash.supervised_daemon import POLL_S, SETTLE_S, SupervisedDaemon
from tests.crash.waits import Within

MIGRATED = re.compile(r"schema_migrations")
DRAFT = re.compile(r"\.[0-9a-f]{8}$")
FROZEN_S = 1.4 * LEASE_S
UNBORN_S = 2.5
"""Seconds from an attempt's end to the birth of a late machine; they are not charged."""
MARK = "sweep-report-only"

# ----------------------------------------------------------------------------------------------------------- the home


async def home_effects(services: SharedServices) -> list[str]:
    """Return the daemon's effects on the files of a new home, from its first start until it serves."""
    async with DaemonRig(services, new=True) as rig:
        rig.daemon.orders["die_at"] = -1
        rig.daemon.start()
        await rig.daemon.serves()
        return watched(rig.daemon.home).read_text().splitlines()


async def killed_at_file(services: SharedServices, effect: int, totals: Totals) -> None:
    """Run one life in a new home, and kill its first start just before the effect with this number."""
    async with DaemonRig(services, new=True) as rig:
        rig.daemon.orders["die_at"] = effect
        rig.daemon.start()
        await rig.submit()
        totals.add(rig, await rig.settle(), 1)
        left = [file.name for file in rig.daemon.home.iterdir() if DRAFT.search(file.name)]
        totals.broken += [f"{name} was left half written in the home" for name in left]


# ------------------------------------------------------------------------------------------------------- the database


async def migrations(services: SharedServices) -> list[Point]:
    """Return every commit of an empty database's first start, under an old home."""
    async with DaemonRig(services, template=None) as rig:
        rig.daemon.start()
        await rig.daemon.serves()
        found = [point for point in rig.daemon.gate.passages if MIGRATED.search(point.name)]
    return [Point(name=p.name, number=p.number, moment=moment) for p in found for moment in ("before", "after")]


async def killed_in_migration(services: SharedServices, point: Point, totals: Totals) -> None:
    """Kill the daemon during a migration. The next start still treats the database as new, and destroys no orphan."""
    async with DaemonRig(services, template=None) as rig:
        rig.daemon.gate.kill_at = point
        rig.daemon.start()
        await rig.submit()
        totals.add(rig, await rig.settle(), rig.daemon.gate.killed)
        if not (rig.daemon.home / MARK).exists():
            totals.broken.append(f"{point}: the sweep of a new database under an old home is at work")


# ----------------------------------------------------------------------------------------------------- at a passage


async def ended_at(services: SharedServices, point: Point, totals: Totals) -> None:
    """Send SIGTERM during a passage, which then continues."""
    async with DaemonRig(services) as rig:
        gate, daemon = rig.daemon.gate, rig.daemon

        async def terminate() -> None:
            daemon.signal(signal.SIGTERM)

        gate.hold_at, gate.hold = point, terminate
        daemon.start()
        await rig.submit()
        totals.add(rig, await rig.settle(), gate.held)
        totals.missed += not gate.held


async def born_late(services: SharedServices, again: Moment | None, totals: Totals) -> None:
    """Kill the daemon during a create that reaches the cloud only after the job has ended and its ledger is closed.

    `again`: moment of a second kill, at the destroy of the late machine; None: no second kill.
    """
    async with DaemonRig(services) as rig:
        gate, daemon, come, settled = rig.daemon.gate, rig.daemon, asyncio.Event(), dict[str, Decimal]()

        async def keep() -> None:
            daemon.end()
            while not (rig.acknowledged and await rig.rests(rig.acknowledged[0])):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            if again is not None:
                gate.kill_at = Point(name="cloud:destroy", number=gate.count("cloud:destroy") + 1, moment=again)
            settled.update(await rig.charged())
            await asyncio.sleep(UNBORN_S)
            come.set()

        gate.hold_at, gate.hold = Point(name="cloud:create", number=1, moment="before"), keep
        daemon.start()
        await rig.submit()
        async with Within(2 * SETTLE_S, "the job rests, and its create comes through", daemon.status_message):
            await come.wait()
        before = len(services.cloud.of(rig.installation))
        async with Within(SETTLE_S, "the machine is born late", daemon.status_message):
            while len(services.cloud.of(rig.installation)) == before:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        late = services.cloud.of(rig.installation)[-1]
        late.late = True
        unpaid = await rig.unpaid(late, settled, less_s=float(again == "after"))
        verdict = await rig.settle()
        verdict.underbilled += unpaid
        verdict.overbilled += await rig.paid_before_birth(late, settled)
        totals.add(rig, verdict, 1 + gate.killed)


async def frozen_at(services: SharedServices, point: Point, totals: Totals) -> None:
    """Freeze the first of two brokers that reaches the point, until the other broker holds its leases.

    The frozen broker's call arrives only then, and the broker continues.
    """
    async with DaemonRig(services, daemons=2) as rig:
        for daemon in rig.daemons:
            daemon.gate.hold_at = point
            daemon.gate.hold = lambda daemon=daemon: _freeze(rig.daemons, daemon)  # type: ignore[misc]
            daemon.start()
        for daemon in rig.daemons:
            await daemon.serves()
        await rig.submit()
        verdict = await rig.settle()
        held = sum(daemon.gate.held for daemon in rig.daemons)
        totals.add(rig, verdict, held)
        totals.missed += not held


async def _freeze(daemons: Sequence[SupervisedDaemon], daemon: SupervisedDaemon) -> None:
    for one in daemons:
        one.gate.hold_at = None
    daemon.signal(signal.SIGSTOP)
    await asyncio.sleep(FROZEN_S)
    daemon.signal(signal.SIGCONT)


# ------------------------------------------------------------------------------------------------------------ the disk


async def filled(services: SharedServices, times: int, seed: int, totals: Totals) -> None:
    """Fill the home's disk for a while; every other time, kill the daemon so that it starts on the full disk."""
    draw = random.Random(f"full/{seed}")
    async with DaemonRig(services) as rig:
        daemon = rig.daemon
        daemon.start()
        await daemon.serves()
        kills = 0
        async with Flow(rig):
            for number in range(times):
                await asyncio.sleep(draw.uniform(0, 1.0))
                daemon.disk(full=True)
                await asyncio.sleep(draw.uniform(0, 1.0))
                if number % 2:
                    kills += daemon.signal(signal.SIGKILL)
                    await asyncio.sleep(draw.uniform(0, 2.0))
                daemon.disk(full=False)
        totals.add(rig, await rig.settle(), kills)
