"""The cheapest run in hindsight over the traces of one or more zones, by dynamic programming backwards over ticks.

State: the machine, and the units of work left, including the rest of the current changeover.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from math import ceil, inf

from broker.simulation.runs import SimulatedMachine
from broker.simulation.traces import Trace

UNITS = 5
"""Units of work in one tick: the resolution of the optimum."""
Column = list[float]
"""Dollars to finish, by units left."""


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The cheapest run in hindsight."""

    usd: float
    """Infinite if no run finishes."""
    machines: tuple[SimulatedMachine | None, ...] = ()
    """Machine of each tick until the end of the work; empty unless the plan was requested."""


@dataclass(frozen=True)
class _Tick:
    """Dollars to finish from one tick on."""

    running: dict[SimulatedMachine, Column]
    """Columns of each machine on sale. The changeover of a new machine is part of the units."""
    waiting: Column
    """Column of a tick in which no machine runs."""
    idle: Column


def optimum(zones: Sequence[Trace], work_s: float, changeover_s: float, *, plan: bool = False) -> Optimum:
    """Return the cheapest run that ends within the traces. `plan`: also return its machines."""
    unit_s = zones[0].tick_s / UNITS
    work, changeover = _units(work_s / unit_s), _units(changeover_s / unit_s)
    size = work + 2 * changeover + 2
    cheapest = min(range(len(zones)), key=lambda zone: zones[zone].on_demand_usd)
    machines = [SimulatedMachine("on-demand", cheapest), *(SimulatedMachine("spot", n) for n in range(len(zones)))]
    idle = [0.0, *repeat(inf, size - 1)]
    after = dict.fromkeys(machines, idle)
    ticks = []
    for number in reversed(range(len(zones[0].available))):
        step = _step(zones, number, after, idle, changeover)
        after = {machine: _cheaper(step.idle, step.running.get(machine)) for machine in machines}
        idle = step.idle
        if plan:
            ticks.append(step)
    return Optimum(usd=idle[work], machines=_plan(ticks[::-1], work, changeover) if idle[work] < inf else ())


def _units(exact: float) -> int:
    """Return whole units, rounded up so that the plan finishes in time."""
    return ceil(exact - 1e-9)


def _step(
    zones: Sequence[Trace], number: int, after: dict[SimulatedMachine, Column], idle: Column, changeover: int
) -> _Tick:
    running = {}
    for machine, column in after.items():
        zone = zones[machine.zone]
        if machine.market == "on-demand":
            running[machine] = _spent(zone.on_demand_usd, zone.tick_s, column)
        elif zone.available[number]:
            running[machine] = _spent(zone.spot_usd[number], zone.tick_s, column)
    best, *others = running.values()
    for column in others:
        best = _cheaper(best, column)
    started = [*best[changeover:], *repeat(inf, changeover)]
    now = _cheaper(idle, started)
    now[0] = 0.0
    return _Tick(running, idle, now)


def _spent(price: float, tick_s: int, after: Column) -> Column:
    """Return the dollars to finish with one tick on a machine; `after`: the dollars from the next tick on."""
    first = [price * (units / UNITS * tick_s / 3600) + after[0] for units in range(UNITS)]
    tick_usd = price * (UNITS / UNITS * tick_s / 3600)
    column = [*first, *[tick_usd + usd for usd in after[:-UNITS]]]
    column[0] = 0.0
    return column[: len(after)]


def _cheaper(first: Column, second: Column | None) -> Column:
    if second is None:
        return first
    return [a if a < b else b for a, b in zip(first, second, strict=True)]


def _plan(ticks: Sequence[_Tick], units: int, changeover: int) -> tuple[SimulatedMachine | None, ...]:
    """Return the machine of each tick, forwards. At equal cost the machine stays, because a change must have a gain."""
    machine: SimulatedMachine | None = None
    machines = list[SimulatedMachine | None]()
    for tick in ticks:
        if not units:
            break
        stays = tick.running.get(machine) if machine else None
        if stays is None or tick.idle[units] < stays[units]:
            started = min(tick.running, key=lambda m, at=units: _at(tick.running[m], at + changeover))  # type: ignore[misc]
            if tick.waiting[units] <= _at(tick.running[started], units + changeover):
                machine = None
            else:
                machine, units = started, units + changeover
        machines.append(machine)
        units = max(0, units - UNITS) if machine else units
    return tuple(machines)


def _at(column: Column, units: int) -> float:
    return column[units] if units < len(column) else inf
