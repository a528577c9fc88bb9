"""Other ends than a kill at a passage: at a file of the home, in a migration, politely, frozen, on a full disk."""

import asyncio
import random
import re
import signal
from collections.abc import Sequence
from decimal import Decimal

from tests.crash.gate import Moment, Point
from tests.crash.house import House
from tests.crash.nursery import LEASE_S, watched
from tests.crash.rig import Rig
from tests.crash.scenes import Flow, Totals
from tests.crash.seat import LOOK_S, SETTLE_S, Seat
from tests.crash.waits import Within

MIGRATED = re.compile(r"schema_migrations")
DRAFT = re.compile(r"\.[0-9a-f]{8}$")
FROZEN_S = 1.4 * LEASE_S
UNBORN_S = 2.5
"""From an attempt's end to a machine that comes late: nobody pays for that."""
MARK = "sweep-report-only"

# ----------------------------------------------------------------------------------------------------------- the home


async def home_effects(rig: Rig) -> list[str]:
    """What a daemon does to the files of a new home, from its first start until it serves."""
    async with House(rig, new=True) as house:
        house.seat.orders["die_at"] = -1
        house.seat.start()
        await house.seat.serves()
        return watched(house.seat.home).read_text().splitlines()


async def killed_at_file(rig: Rig, effect: int, totals: Totals) -> None:
    """One life in a new home, killed right before that effect of its first start."""
    async with House(rig, new=True) as house:
        house.seat.orders["die_at"] = effect
        house.seat.start()
        await house.submit()
        totals.add(house, await house.settle(), 1)
        left = [file.name for file in house.seat.home.iterdir() if DRAFT.search(file.name)]
        totals.broken += [f"{name} was left half written in the home" for name in left]


# ------------------------------------------------------------------------------------------------------- the database


async def migrations(rig: Rig) -> list[Point]:
    """Every commit of an empty database's first start, under an old home."""
    async with House(rig, template=None) as house:
        house.seat.start()
        await house.seat.serves()
        found = [point for point in house.seat.gate.seen if MIGRATED.search(point.name)]
    return [Point(name=p.name, number=p.number, moment=moment) for p in found for moment in ("before", "after")]


async def killed_in_migration(rig: Rig, point: Point, totals: Totals) -> None:
    """The next start goes on with the migrations, and still knows that this database is new: it only reports."""
    async with House(rig, template=None) as house:
        house.seat.gate.kill_at = point
        house.seat.start()
        await house.submit()
        totals.add(house, await house.settle(), house.seat.gate.killed)
        if not (house.seat.home / MARK).exists():
            totals.broken.append(f"{point}: the sweep of a new database under an old home is at work")


# ----------------------------------------------------------------------------------------------------- at a passage


async def ended_at(rig: Rig, point: Point, totals: Totals) -> None:
    """SIGTERM while that passes: it is neither broken off nor waited for."""
    async with House(rig) as house:
        gate, seat = house.seat.gate, house.seat

        async def terminate() -> None:
            seat.signal(signal.SIGTERM)

        gate.hold_at, gate.hold = point, terminate
        seat.start()
        await house.submit()
        totals.add(house, await house.settle(), gate.held)
        totals.missed += not gate.held


async def born_late(rig: Rig, again: Moment | None, totals: Totals) -> None:
    """Killed while its create is on the way, which arrives only when the job rests: a machine of an attempt that has
    ended, and its money settled. `again`: killed once more, when that machine is destroyed."""
    async with House(rig) as house:
        gate, seat, come, settled = house.seat.gate, house.seat, asyncio.Event(), dict[str, Decimal]()

        async def keep() -> None:
            seat.end()
            while not (house.acknowledged and await house.rests(house.acknowledged[0])):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
            if again is not None:
                gate.kill_at = Point(name="cloud:destroy", number=gate.count("cloud:destroy") + 1, moment=again)
            settled.update(await house.charged())
            await asyncio.sleep(UNBORN_S)
            come.set()

        gate.hold_at, gate.hold = Point(name="cloud:create", number=1, moment="before"), keep
        seat.start()
        await house.submit()
        async with Within(2 * SETTLE_S, "the job rests, and its create comes through", seat.told):
            await come.wait()
        before = len(rig.cloud.of(house.installation))
        async with Within(SETTLE_S, "the machine is born late", seat.told):
            while len(rig.cloud.of(house.installation)) == before:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
        late = rig.cloud.of(house.installation)[-1]
        late.late = True
        unpaid = await house.unpaid(late, settled, less_s=float(again == "after"))
        verdict = await house.settle()
        verdict.underbilled += unpaid
        verdict.overbilled += await house.paid_before_birth(late, settled)
        totals.add(house, verdict, 1 + gate.killed)


async def frozen_at(rig: Rig, point: Point, totals: Totals) -> None:
    """Two brokers; whichever comes to that point first is frozen there until its leases are the other's. What it had
    sent arrives only then, and it goes on as if nothing had been."""
    async with House(rig, seats=2) as house:
        for seat in house.seats:
            seat.gate.hold_at = point
            seat.gate.hold = lambda seat=seat: _freeze(house.seats, seat)  # type: ignore[misc]
            seat.start()
        for seat in house.seats:
            await seat.serves()
        await house.submit()
        verdict = await house.settle()
        held = sum(seat.gate.held for seat in house.seats)
        totals.add(house, verdict, held)
        totals.missed += not held


async def _freeze(seats: Sequence[Seat], seat: Seat) -> None:
    for one in seats:
        one.gate.hold_at = None
    seat.signal(signal.SIGSTOP)
    await asyncio.sleep(FROZEN_S)
    seat.signal(signal.SIGCONT)


# ------------------------------------------------------------------------------------------------------------ the disk


async def filled(rig: Rig, times: int, seed: int, totals: Totals) -> None:
    """The home's disk is full for a while; every other time the daemon is killed meanwhile, and has to start on it."""
    draw = random.Random(f"full/{seed}")
    async with House(rig) as house:
        seat = house.seat
        seat.start()
        await seat.serves()
        kills = 0
        async with Flow(house):
            for number in range(times):
                await asyncio.sleep(draw.uniform(0, 1.0))
                seat.disk(full=True)
                await asyncio.sleep(draw.uniform(0, 1.0))
                if number % 2:
                    kills += seat.signal(signal.SIGKILL)
                    await asyncio.sleep(draw.uniform(0, 2.0))
                seat.disk(full=False)
        totals.add(house, await house.settle(), kills)
