"""Lives in which a daemon is killed: an undisturbed plain life, and lives in which users or the cloud act.

Users act over the HTTP API. From the moment at which a life differs from the plain one, its name prefixes its passages:
`preempted/commit:apply(launching)#1`.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from decimal import Decimal
from secrets import token_hex

from tests.crash.daemon_rig import RESTING, DaemonRig
from tests.crash.gate import Point, bare
from tests.crash.loopback_cloud import AGENT, ENDLESS, AgentKind, SoldMachine
from tests.crash.supervised_daemon import POLL_S, SETTLE_S
from tests.crash.waits import Within

CREATE = "cloud:create"
SUBMIT = "commit:submit+submitted"
RAISE = "commit:raise_cap+write_audit+write_events"
LOW_USD, HIGH_USD = "0.012", Decimal(5)
"""Caps. `LOW_USD` pays for a drain and what follows it, 9.15 s (`billing.drain_lead_s`), and little more."""
SOON = AgentKind(config=ENDLESS.model_copy(update={"run_s": AGENT.run_s}))
"""Agent that resumes from an endless agent's checkpoint and completes."""
GOES_ON = "commit:apply(booting)"


@dataclass(frozen=True, kw_only=True)
class Life:
    act: Callable[[DaemonRig], Awaitable[None]]
    """Actions of users and the cloud, after which the life only waits until all jobs are terminal."""
    attempts: tuple[str, ...] = ("completed",)
    """Reasons for which the attempts end in an undisturbed life, in order."""
    passes: tuple[str, ...] = ()
    """Passages that the life exists to reach, in its own part."""
    until: str = ""
    """Passage after which the life equals the plain one again; empty: none."""
    leaves: str = ""
    """Query that returns a row at the life's end, wherever the daemon was killed; empty: no query."""


async def _plain(rig: DaemonRig) -> None:
    await rig.submit()


async def _stopped(rig: DaemonRig) -> None:
    """Stop the job while it trains and is far from its end."""
    rig.behaviour.kind = AgentKind(config=ENDLESS)
    job = await rig.submit()
    await _trains(rig)
    rig.daemon.gate.part = "stopped"
    await _stop(rig, job)


async def _stopped_early(rig: DaemonRig) -> None:
    """Stop the job during its create, which arrives when the launch is cancelled, or never if the caller is dead."""
    gate, daemon, event, given_up = rig.daemon.gate, rig.daemon, asyncio.Event(), asyncio.Event()

    async def hold() -> bool:
        caller = daemon.starts, gate.killed
        event.set()
        await given_up.wait()
        return caller == (daemon.starts, gate.killed)

    rig.behaviour.kind = AgentKind(config=ENDLESS)
    gate.opens[CREATE] = "stopped early"
    gate.hold_at, gate.hold = Point(name=f"stopped early/{CREATE}", number=1, moment="before"), hold
    job = await rig.submit()
    async with Within(SETTLE_S, "the create is on its way", daemon.status_message):
        await event.wait()
    await _stop(rig, job)
    await rig.until("its launch is given up", "SELECT 1 FROM attempts WHERE state IN ('terminating', 'ended')")
    given_up.set()


async def _preempted(rig: DaemonRig) -> None:
    """Preempt the machine after a checkpoint, from which the next machine resumes."""
    rig.behaviour.kind = AgentKind(config=ENDLESS)
    await rig.submit()
    machine = await _machine(rig)
    async with Within(SETTLE_S, "it has a checkpoint", rig.daemon.status_message):
        while not rig.services.cloud.saved(machine):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
    rig.behaviour.kind = SOON
    rig.daemon.gate.part = "preempted"
    rig.services.cloud.take(machine)


async def _capped(rig: DaemonRig) -> None:
    """Let the job near its cap, drain, and continue when the cap is raised."""
    rig.behaviour.kind = AgentKind(config=ENDLESS)
    job = await rig.submit(cap_usd=LOW_USD)
    await _trains(rig)
    rig.daemon.gate.part = "capped"
    await rig.until("it is capped", f"SELECT 1 FROM jobs WHERE id = '{job}' AND state = 'capped'")
    rig.behaviour.kind = SOON
    await _raise(rig, job)


async def _raised(rig: DaemonRig) -> None:
    """Raise the cap while the job drains for it."""
    rig.behaviour.kind = AgentKind(config=ENDLESS)
    job = await rig.submit(cap_usd=LOW_USD)
    await rig.until("it drains", "SELECT 1 FROM attempts WHERE state IN ('draining', 'terminating', 'ended')")
    rig.behaviour.kind = SOON
    rig.daemon.gate.part = "raised"
    await _raise(rig, job)


async def _unheard(rig: DaemonRig) -> None:
    """Lose the reply of the create, so that the machine is looked up and adopted."""
    gate = rig.daemon.gate

    async def lose() -> bool:
        gate.part = "unheard"
        return False

    gate.hold_at, gate.hold = Point(name=CREATE, number=1, moment="after"), lose
    await rig.submit()


async def _failed(rig: DaemonRig) -> None:
    """Let the program end with an error, then retry the job."""
    rig.behaviour.kind = AgentKind(faulty=True)
    rig.daemon.gate.opens["blob:get final.json"] = "failed"
    job = await rig.submit()
    rig.ends[job] = "failed"
    await rig.until("it has failed", f"SELECT 1 FROM jobs WHERE id = '{job}' AND state IN {RESTING}")
    rig.behaviour.kind, key = AgentKind(), token_hex(8)
    again = await rig.called("retry", lambda client: client.retry(job, resume=True, key=key))
    rig.acknowledged.append(str(again.id))


async def _refused(rig: DaemonRig) -> None:
    """Sell out the first offer at its create, so that the next one is bought."""
    rig.behaviour.regions, rig.behaviour.sold_out = ("here", "there"), frozenset({"here"})
    rig.daemon.gate.opens[CREATE] = "refused"
    await rig.submit()


PLAIN = Life(act=_plain)
LIVES: dict[str, Life] = {
    "": PLAIN,
    "stopped": Life(act=_stopped, attempts=("stopped",), passes=("commit:apply(draining)",)),
    "stopped early": Life(act=_stopped_early, attempts=("stopped",), passes=(CREATE, "commit:mark_launchers_finished")),
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
"""Lives by the names of their parts."""

# --------------------------------------------------------------------------------------------------------------- steps


async def _trains(rig: DaemonRig) -> None:
    await rig.until("it trains", "SELECT 1 FROM attempts WHERE first_beat_at IS NOT NULL OR ended_at IS NOT NULL")


async def _machine(rig: DaemonRig) -> SoldMachine:
    async with Within(SETTLE_S, "a machine is born", rig.daemon.status_message):
        while not (alive := rig.services.cloud.alive(rig.installation)):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
    return alive[0]


async def _stop(rig: DaemonRig, job: str) -> None:
    rig.ends[job] = "cancelled"
    await rig.called("cancel", lambda client: client.cancel(job))


async def _raise(rig: DaemonRig, job: str) -> None:
    await rig.called("raise_cap", lambda client: client.raise_cap(job, HIGH_USD))


def life_of(point: Point) -> str:
    """Return the name of the point's life."""
    return point.name.rpartition("/")[0]


async def deviations(rig: DaemonRig, name: str) -> list[str]:
    """Return messages about passages and attempt ends that a life without a kill lacked."""
    life, passed = LIVES[name], {bare(one.name) for one in rig.daemon.gate.passages if life_of(one) == name}
    rows = await rig.ask("SELECT a.reason FROM attempts a JOIN jobs j ON j.id = a.job_id ORDER BY j.created_at, number")
    ended = tuple(reason for (reason,) in rows)
    words = [f"it did not come by {one}" for one in life.passes if one not in passed]
    words += [*await not_left(rig, name), *bought_twice(rig)]
    return words if ended == life.attempts else [*words, f"its attempts ended for {ended}, not {life.attempts}"]


async def not_left(rig: DaemonRig, name: str) -> list[str]:
    """Return messages on required rows that are missing at a life's end."""
    asked = LIVES[name].leaves
    return [f"{name}: nothing answers {asked}"] if asked and not await rig.ask(asked) else []


def bought_twice(rig: DaemonRig) -> list[str]:
    """Return attempts with more than one machine. In these lives no machine vanishes before its create is answered or
    looked up, so the broker never repeats a create.
    """
    sold = Counter(one.attempt for one in rig.services.cloud.of(rig.installation))
    return [f"attempt {attempt} was bought {count} machines" for attempt, count in sold.items() if count > 1]
