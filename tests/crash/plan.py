"""Plan of a run: the number of each scene. The scenes run in parallel lanes, and their counts are added up."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from broker.runtime.clock import SystemClock
from tests.crash import checkpoints, hardships
from tests.crash.gate import Moment, Point
from tests.crash.lives import LIVES
from tests.crash.scenes import (
    ROUND,
    LogLine,
    Totals,
    commit,
    cut_at_random,
    enumerate_points,
    fought,
    kill_at,
    killed_at_random,
    postgres_killed,
    sampled,
)
from tests.crash.services import SharedServices, open_services
from tests.crash.waits import during

AGAIN: Sequence[Moment | None] = (None, "before", "after")
"""Moments of a second kill at the destroy of a late machine; None: no second kill."""

BUSY_INSTALLATIONS = 2
"""Number of installations with several jobs, some with two daemons, that run at a time on two cores."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Number of kills of each kind.

    `points` selects points of the plain life, and `lives` those of the other lives: None selects none, 1 all, and n
    every n-th, with an offset that depends on the commit.
    """

    points: int | None = None
    lives: int | None = None
    random: int = 0
    postgres: int = 0
    fights: int = 0
    cuts: int = 0
    checkpoints: int = 0
    homes: int = 0
    migrations: int = 0
    terms: int = 0
    freezes: int = 0
    disks: int = 0
    births: int = 0
    seed: int = 0
    lanes: int = 2
    """Number of installations that run at a time, if no kill affects several."""
    preempts: float = 0.1
    """Share of the machines that the cloud preempts during random kills."""


async def carry_out(plan: Plan, log_line: LogLine = lambda line: None) -> Totals:
    totals = Totals()
    if plan.checkpoints:
        totals.add_checkpoints(await checkpoints.carry_out(plan.checkpoints, plan.seed, log_line))
    if plan.points or plan.lives or plan.homes or plan.migrations or plan.terms or plan.freezes or plan.births:
        async with open_services(seed=plan.seed) as services:
            await _at_points(plan, services, totals, log_line)
    several = min(plan.lanes, BUSY_INSTALLATIONS)
    scenes: tuple[tuple[int, int, Callable[..., Awaitable[None]]], ...] = (
        (plan.random, several, killed_at_random),
        (plan.cuts, several, cut_at_random),
        (plan.fights, several, fought),
        (plan.disks, several, hardships.filled),
        (plan.postgres, 1, postgres_killed),
    )
    if any(count for count, _, _ in scenes):
        async with open_services(seed=plan.seed, preempts=plan.preempts) as services:
            for count, lanes, scene in scenes:
                rounds = [(i, min(ROUND, count - i)) for i in range(0, count, ROUND)]
                await _in_lanes(
                    plan,
                    rounds,
                    _round(services, scene, plan.seed, totals),
                    totals,
                    log_line,
                    lanes=lanes,
                    name=scene.__name__,
                )
    return totals


async def _at_points(plan: Plan, services: SharedServices, totals: Totals, log_line: LogLine) -> None:
    """Run the scenes at known points, each in its own installation."""
    found = await enumerate_points(services)
    chosen = _some(found, plan.points, plan)
    if plan.points:
        log_line(f"{len(found)} points of one life, {len(chosen)} of them now")
    if plan.lives:
        others = await _others(plan, services, totals, log_line)
        chosen += (own := _some(others, plan.lives, plan))
        log_line(f"{len(others)} points of {len(LIVES) - 1} other lives, {len(own)} of them now")
    await _in_lanes(plan, chosen, lambda one: kill_at(services, one, totals), totals, log_line)
    effects = list(enumerate(await hardships.home_effects(services))) if plan.homes else []
    steps = await hardships.migrations(services) if plan.migrations else []
    once = [point for point in found if point.number == 1]
    scenes: tuple[tuple[str, Sequence[Any], int, Callable[[Any], Awaitable[None]]], ...] = (
        ("killed before", effects, plan.homes, lambda one: hardships.killed_at_file(services, one[0], totals)),
        ("killed", steps, plan.migrations, lambda one: hardships.killed_in_migration(services, one, totals)),
        ("SIGTERM", once, plan.terms, lambda one: hardships.ended_at(services, one, totals)),
        ("frozen", once, plan.freezes, lambda one: hardships.frozen_at(services, one, totals)),
        ("born late", AGAIN, plan.births, lambda one: hardships.born_late(services, one, totals)),
    )
    for name, places, count, act in scenes:
        # Three pairs of brokers want more connections than the PostgreSQL that they share has.
        lanes = min(plan.lanes, BUSY_INSTALLATIONS) if name == "frozen" else plan.lanes
        drawn = _drawn(places, count, f"{name}/{plan.seed}")
        await _in_lanes(plan, drawn, act, totals, log_line, lanes=lanes, name=name)


async def _others(plan: Plan, services: SharedServices, totals: Totals, log_line: LogLine) -> list[Point]:
    """Return points of all lives but the plain one, life by life."""
    found: dict[str, list[Point]] = {name: [] for name in LIVES if name}

    async def look(name: str) -> None:
        found[name] = await enumerate_points(services, name)

    await _in_lanes(plan, list(found), look, totals, log_line, name="undisturbed:")
    return [point for points in found.values() for point in points]


def _some(found: list[Point], share: int | None, plan: Plan) -> list[Point]:
    if not share:
        return []
    return list(found) if share == 1 else sampled(found, commit(), share, plan.seed)


def _drawn(places: Sequence[Any], count: int, seed: str) -> list[Any]:
    """Draw each item once before any item comes twice."""
    draw, order = random.Random(seed), list[Any]()
    while places and len(order) < count:
        order += draw.sample(places, len(places))
    return order[:count]


def _round(
    services: SharedServices, scene: Callable[..., Awaitable[None]], seed: int, totals: Totals
) -> Callable[[tuple[int, int]], Awaitable[None]]:
    return lambda part: scene(services, part[1], seed * 1_000_000 + part[0], totals)


async def _in_lanes(
    plan: Plan, items: Sequence[Any], act: Callable[[Any], Awaitable[None]], totals: Totals, log_line: LogLine, *,
    lanes: int | None = None, name: str = "",
) -> None:  # fmt: skip
    """Run each item once, a fixed number at a time, and print one line for each."""
    waiting, clock = list(reversed(items)), SystemClock()

    async def lane() -> None:
        while waiting:
            item, began = waiting.pop(), clock.monotonic()
            broken, missed = len(totals.broken), len(totals.passed_by)
            with during(f"{name or 'killed'} {item}"):
                await act(item)
            trouble = "".join(f"\n  BROKEN: {one}" for one in totals.broken[broken:])
            # Another lane's may be among what is new.
            trouble += "\n  missed" if str(item) in totals.passed_by[missed:] else ""
            log_line(f"{clock.monotonic() - began:5.1f} s  {name} {item}{trouble}")

    async with asyncio.TaskGroup() as group:
        for _ in range(min(lanes or plan.lanes, len(waiting))):
            group.create_task(lane())
