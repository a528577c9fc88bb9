"""The lives that a daemon is killed in: one that nothing disturbs, and those in which people or the cloud do something.

Each is carried out over the HTTP API, as people do it, and by what the cloud does. From the moment at which it leaves
the plain one its passages are named by it (`RateLimitedProvider.part`): `preempted/commit:apply(launching)#1`.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from decimal import Decimal
from secrets import token_hex

from tests.crash.cloud import AGENT, ENDLESS, Kind, Stand
from tests.crash.gate import Point, bare
from tests.crash.house import RESTING, House
from tests.crash.seat import LOOK_S, SETTLE_S
from tests.crash.waits import Within

CREATE = "cloud:create"
SUBMIT = "commit:submit+write_audit+write_events"
RAISE = "commit:raise_cap+write_audit+write_events"
LOW_USD, HIGH_USD = "0.012", Decimal(5)
"""The first one lasts for the 9.15 s of a drain and all that follows it (`billing.drain_lead_s`), and some more."""
SOON = Kind(config=ENDLESS.model_copy(update={"run_s": AGENT.run_s}))
"""Goes on from where an endless one came to, and is through."""
GOES_ON = "commit:apply(booting)"


@dataclass(frozen=True, kw_only=True)
class Life:
    act: Callable[[House], Awaitable[None]]
    """Up to where nothing is left to be done but to wait for the jobs to rest."""
    attempts: tuple[str, ...] = ("completed",)
    """What they end for, in their order, where nobody is killed."""
    passes: tuple[str, ...] = ()
    """What it is for: it comes by all of these, in its own part."""
    until: str = ""
    """The passage after which it is like the plain one again."""
    leaves: str = ""
    """Asked for at its end, wherever it was killed, this has a row."""


async def _plain(house: House) -> None:
    await house.submit()


async def _stopped(house: House) -> None:
    """While it trains, and would not end for long."""
    house.ways.kind = Kind(config=ENDLESS)
    job = await house.submit()
    await _trains(house)
    house.seat.gate.part = "stopped"
    await _stop(house, job)


async def _stopped_early(house: House) -> None:
    """While its create is on the way, which comes through when the launch is given up; with its caller dead, never."""
    gate, seat, held, given_up = house.seat.gate, house.seat, asyncio.Event(), asyncio.Event()

    async def hold() -> bool:
        caller = seat.starts, gate.killed
        held.set()
        await given_up.wait()
        return caller == (seat.starts, gate.killed)

    house.ways.kind = Kind(config=ENDLESS)
    gate.opens[CREATE] = "stopped early"
    gate.hold_at, gate.hold = Point(name=f"stopped early/{CREATE}", number=1, moment="before"), hold
    job = await house.submit()
    async with Within(SETTLE_S, "the create is on its way", seat.told):
        await held.wait()
    await _stop(house, job)
    await house.until("its launch is given up", "SELECT 1 FROM attempts WHERE state IN ('terminating', 'ended')")
    given_up.set()


async def _preempted(house: House) -> None:
    """With a checkpoint, from which the next machine goes on."""
    house.ways.kind = Kind(config=ENDLESS)
    await house.submit()
    machine = await _machine(house)
    async with Within(SETTLE_S, "it has a checkpoint", house.seat.told):
        while not house.rig.cloud.saved(machine):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
    house.ways.kind = SOON
    house.seat.gate.part = "preempted"
    house.rig.cloud.take(machine)


async def _capped(house: House) -> None:
    """It comes near its cap, drains, and goes on when its cap is raised."""
    house.ways.kind = Kind(config=ENDLESS)
    job = await house.submit(cap_usd=LOW_USD)
    await _trains(house)
    house.seat.gate.part = "capped"
    await house.until("it is capped", f"SELECT 1 FROM jobs WHERE id = '{job}' AND state = 'capped'")
    house.ways.kind = SOON
    await _raise(house, job)


async def _raised(house: House) -> None:
    """Its cap is raised while it drains for it."""
    house.ways.kind = Kind(config=ENDLESS)
    job = await house.submit(cap_usd=LOW_USD)
    await house.until("it drains", "SELECT 1 FROM attempts WHERE state IN ('draining', 'terminating', 'ended')")
    house.ways.kind = SOON
    house.seat.gate.part = "raised"
    await _raise(house, job)


async def _unheard(house: House) -> None:
    """The reply of its create is lost: the machine is looked up, and adopted."""
    gate = house.seat.gate

    async def lose() -> bool:
        gate.part = "unheard"
        return False

    gate.hold_at, gate.hold = Point(name=CREATE, number=1, moment="after"), lose
    await house.submit()


async def _failed(house: House) -> None:
    """Its program ends with an error, and people try again."""
    house.ways.kind = Kind(faulty=True)
    house.seat.gate.opens["blob:get final.json"] = "failed"
    job = await house.submit()
    house.ends[job] = "failed"
    await house.until("it has failed", f"SELECT 1 FROM jobs WHERE id = '{job}' AND state IN {RESTING}")
    house.ways.kind, key = Kind(), token_hex(8)
    again = await house.called("retry", lambda client: client.retry(job, resume=True, key=key))
    house.acknowledged.append(str(again.id))


async def _refused(house: House) -> None:
    """The cloud has no machine of the first offer after all, and the next one is bought."""
    house.ways.regions, house.ways.sold_out = ("here", "there"), frozenset({"here"})
    house.seat.gate.opens[CREATE] = "refused"
    await house.submit()


PLAIN = Life(act=_plain)
LIVES: dict[str, Life] = {
    "": PLAIN,
    "stopped": Life(act=_stopped, attempts=("stopped",), passes=("commit:apply(draining)",)),
    "stopped early": Life(act=_stopped_early, attempts=("stopped",), passes=(CREATE, "commit:launchers_through")),
    "preempted": Life(
        act=_preempted, attempts=("preempted", "completed"), passes=(CREATE,), until=GOES_ON,
        leaves="SELECT 1 FROM attempts WHERE reason = 'completed' AND final->>'resumed_from' IS NOT NULL",
    ),
    "capped": Life(
        act=_capped, attempts=("capped", "completed"), until=GOES_ON,
        passes=("commit:apply(capped,draining)", "commit:charge(capped,ended)", RAISE, CREATE),
    ),
    "raised": Life(
        act=_raised, attempts=("capped", "completed"), until="commit:apply(queued)",
        passes=(RAISE, "commit:charge(capped,ended,recovering)", CREATE),
    ),
    "unheard": Life(act=_unheard, passes=("commit:apply(booting)",), until=GOES_ON),
    "failed": Life(act=_failed, attempts=("user_error", "completed"), passes=(SUBMIT, CREATE), until=SUBMIT),
    "refused": Life(act=_refused, attempts=("no_capacity", "completed"), passes=(CREATE,), until=GOES_ON),
}  # fmt: skip
"""By their parts' names."""

# --------------------------------------------------------------------------------------------------------------- steps


async def _trains(house: House) -> None:
    await house.until("it trains", "SELECT 1 FROM attempts WHERE first_beat_at IS NOT NULL OR ended_at IS NOT NULL")


async def _machine(house: House) -> Stand:
    async with Within(SETTLE_S, "a machine is born", house.seat.told):
        while not (alive := house.rig.cloud.alive(house.installation)):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
    return alive[0]


async def _stop(house: House, job: str) -> None:
    house.ends[job] = "cancelled"
    await house.called("cancel", lambda client: client.cancel(job))


async def _raise(house: House, job: str) -> None:
    await house.called("raise_cap", lambda client: client.raise_cap(job, HIGH_USD))


def life_of(point: Point) -> str:
    """Its name."""
    return point.name.rpartition("/")[0]


async def astray(house: House, name: str) -> list[str]:
    """What a life in which nobody was killed did not come to that it is for, in words."""
    life, passed = LIVES[name], {bare(one.name) for one in house.seat.gate.seen if life_of(one) == name}
    rows = await house.ask(
        "SELECT a.reason FROM attempts a JOIN jobs j ON j.id = a.job_id ORDER BY j.created_at, number"
    )
    ended = tuple(reason for (reason,) in rows)
    words = [f"it did not come by {one}" for one in life.passes if one not in passed]
    words += [*await not_left(house, name), *bought_twice(house)]
    return words if ended == life.attempts else [*words, f"its attempts ended for {ended}, not {life.attempts}"]


async def not_left(house: House, name: str) -> list[str]:
    """What its end has to show and does not, in words."""
    asked = LIVES[name].leaves
    return [f"{name}: nothing answers {asked}"] if asked and not await house.ask(asked) else []


def bought_twice(house: House) -> list[str]:
    """No machine vanishes in these lives before its create is heard of or looked up, so none is bought once more."""
    sold = Counter(one.attempt for one in house.rig.cloud.of(house.installation))
    return [f"attempt {attempt} was bought {count} machines" for attempt, count in sold.items() if count > 1]
