"""Accounting of a job over traces, tick by tick. See `docs/guide/spot-and-deadlines.md`, "Simulation".

A run needs `work_s` seconds of training within a deadline, which is the end of the traces. Each start of a machine
costs `changeover_s` seconds without progress. A spot machine is lost in a tick in which its zone has no spot capacity.
The setting is that of "Can't Be Late" (Wu et al., NSDI 2024).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from broker.simulation.traces import Trace


@dataclass(frozen=True)
class SimulatedMachine:
    """A machine of one zone."""

    market: Literal["spot", "on-demand"]
    zone: int = 0
    """Index into the traces of the run."""


@dataclass(kw_only=True)
class SimulatedRun:
    """A job on the traces of one or more zones. A policy reads it at each tick and returns the machine for the tick."""

    zones: Sequence[Trace]
    work_s: float
    changeover_s: float
    tick: int = 0
    machine: SimulatedMachine | None = None
    done_s: float = 0.0
    pending_s: float = 0.0
    """Remaining seconds of the current changeover."""
    usd: float = 0.0
    preemptions: list[int] = field(default_factory=list)
    """Number of lost spot machines, by zone."""
    spot_s: list[float] = field(default_factory=list)
    """Seconds on spot machines, by zone. Policies may use them as history."""
    starts: int = 0
    waits: int = 0
    """Ticks without a machine."""
    machines: list[SimulatedMachine | None] = field(default_factory=list)
    """Machine of each past tick."""
    cheapest: int = field(init=False)
    """Zone with the lowest on-demand price."""

    def __post_init__(self) -> None:
        self.preemptions = [0] * len(self.zones)
        self.spot_s = [0.0] * len(self.zones)
        self.cheapest = min(range(len(self.zones)), key=lambda zone: self.zones[zone].on_demand_usd)

    @property
    def tick_s(self) -> int:
        return self.zones[0].tick_s

    @property
    def ticks(self) -> int:
        """Return the number of ticks until the deadline."""
        return len(self.zones[0].available)

    @property
    def left_s(self) -> float:
        return self.work_s - self.done_s

    @property
    def time_left_s(self) -> float:
        return float((self.ticks - self.tick) * self.tick_s)

    @property
    def on_spot(self) -> bool:
        return self.machine is not None and self.machine.market == "spot"

    def spot_zone(self) -> int | None:
        """Return the zone with the cheapest spot machine on sale in this tick; None: spot is sold out."""
        on_sale = [number for number, zone in enumerate(self.zones) if zone.available[self.tick]]
        return min(on_sale, key=lambda number: self.zones[number].spot_usd[self.tick], default=None)

    def may_wait(self) -> bool:
        """Return True if a tick without a machine cannot cause a late finish."""
        return self.time_left_s - self.left_s >= max(2 * self.changeover_s, self.changeover_s + self.tick_s)

    def may_try_spot(self) -> bool:
        """Return True if a spot machine that is lost at once cannot cause a late finish."""
        return self.time_left_s - self.left_s >= 2 * self.changeover_s

    def lose_machine(self) -> None:
        """End a spot machine whose zone has no spot capacity in this tick."""
        machine = self.machine
        if machine is not None and machine.market == "spot" and not self.zones[machine.zone].available[self.tick]:
            self.machine, self.pending_s = None, 0.0
            self.preemptions[machine.zone] += 1

    def advance(self, machine: SimulatedMachine | None) -> bool:
        """Spend one tick on `machine`; return True if the work is done. Raises ValueError for sold-out spot."""
        if machine != self.machine:
            self.machine, self.pending_s = machine, self.changeover_s if machine else 0.0
            self.starts += machine is not None
        self.machines.append(machine)
        if machine is None:
            self.waits += 1
            self.tick += 1
            return False
        zone = self.zones[machine.zone]
        if machine.market == "spot" and not zone.available[self.tick]:
            raise ValueError(f"{zone.name}: no spot at tick {self.tick}")
        price = zone.spot_usd[self.tick] if machine.market == "spot" else zone.on_demand_usd
        needed_s = self.pending_s + self.left_s
        spent_s = min(float(self.tick_s), needed_s)
        self.usd += price * spent_s / 3600
        if machine.market == "spot":
            self.spot_s[machine.zone] += spent_s
        changed_s = min(self.pending_s, spent_s)
        self.pending_s -= changed_s
        self.done_s += spent_s - changed_s
        self.tick += 1
        return needed_s <= self.tick_s


Decide = Callable[[SimulatedRun], SimulatedMachine | None]
"""A policy: returns the machine of the next tick, None for no machine."""


def follow(decide: Decide, run: SimulatedRun) -> bool:
    """Run a policy to the end of the work or of the traces; return True if the work is done."""
    for _ in range(run.ticks):
        run.lose_machine()
        if run.advance(decide(run)):
            return True
    return False
