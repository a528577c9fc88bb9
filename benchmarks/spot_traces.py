"""Spot traces of single zones, the accounting of a run over them, and the cheapest run in hindsight.

A run needs `work` seconds of training within a deadline. Each start of a machine costs `changeover` seconds without
progress. A spot machine is lost in a tick in which its zone has no spot capacity. The setting is that of "Can't Be
Late" (Wu et al., NSDI 2024).
"""

import csv
import gzip
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Machine = Literal["none", "spot", "on-demand"]
UNITS = 5
"""Units of work in one tick: the resolution of `optimum_usd`."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One zone, sampled every `tick_s` seconds."""

    name: str
    tick_s: int
    available: tuple[bool, ...]
    spot_usd: tuple[float, ...]
    """Dollars an hour."""
    on_demand_usd: float

    def window(self, start: int, ticks: int) -> "Trace":
        end = start + ticks
        return Trace(
            name=f"{self.name}@{start}",
            tick_s=self.tick_s,
            available=self.available[start:end],
            spot_usd=self.spot_usd[start:end],
            on_demand_usd=self.on_demand_usd,
        )


def read_trace(path: Path, tick_s: int = 600) -> Trace:
    """Return the trace in a file of columns `t_s,available,spot_usd,ondemand_usd`; a row holds until the next one.

    Raises ValueError for a file without two rows.
    """
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        rows = [(float(r["t_s"]), r) for r in csv.DictReader(file)]
    if len(rows) < 2:
        raise ValueError(f"{path}: needs two rows at least; the last one ends the trace")
    times = [t for t, _ in rows]
    picks = [
        rows[bisect_right(times, times[0] + n * tick_s) - 1][1] for n in range(int((times[-1] - times[0]) // tick_s))
    ]
    return Trace(
        name=path.name.partition(".")[0],
        tick_s=tick_s,
        available=tuple(int(r["available"]) > 0 for r in picks),
        spot_usd=tuple(float(r["spot_usd"]) for r in picks),
        on_demand_usd=float(rows[0][1]["ondemand_usd"]),
    )


@dataclass(kw_only=True)
class Run:
    """A job on a trace; a policy reads it at each tick and returns the machine for the tick."""

    trace: Trace
    work_s: float
    changeover_s: float
    tick: int = 0
    machine: Machine = "none"
    done_s: float = 0.0
    pending_s: float = 0.0
    """Remaining seconds of the current changeover."""
    usd: float = 0.0
    preemptions: int = 0
    starts: int = 0
    waits: int = 0
    """Ticks without a machine."""
    spot_s: float = field(default=0.0)
    """Seconds on spot machines, which a policy may use as its history."""

    @property
    def tick_s(self) -> int:
        return self.trace.tick_s

    @property
    def left_s(self) -> float:
        return self.work_s - self.done_s

    @property
    def time_left_s(self) -> float:
        return float((len(self.trace.available) - self.tick) * self.tick_s)

    @property
    def has_spot(self) -> bool:
        return self.trace.available[self.tick]

    def may_wait(self) -> bool:
        """Return True if a tick without a machine cannot cause a late finish."""
        return self.time_left_s - self.left_s >= max(2 * self.changeover_s, self.changeover_s + self.tick_s)

    def may_try_spot(self) -> bool:
        """Return True if a spot machine that is lost at once cannot cause a late finish."""
        return self.time_left_s - self.left_s >= 2 * self.changeover_s

    def advance(self, machine: Machine) -> bool:
        """Spend one tick on `machine`; return True if the work is done."""
        if machine != self.machine:
            self.machine, self.pending_s = machine, self.changeover_s if machine != "none" else 0.0
            self.starts += machine != "none"
        if machine == "none":
            self.waits += 1
            self.tick += 1
            return False
        price = self.trace.spot_usd[self.tick] if machine == "spot" else self.trace.on_demand_usd
        needed_s = self.pending_s + self.left_s
        spent_s = min(float(self.tick_s), needed_s)
        self.usd += price * spent_s / 3600
        self.spot_s += spent_s if machine == "spot" else 0.0
        waited_s = min(self.pending_s, spent_s)
        self.pending_s -= waited_s
        self.done_s += spent_s - waited_s
        self.tick += 1
        return needed_s <= self.tick_s


Policy = Callable[[Run], Machine]


def follow(policy: Policy, run: Run) -> bool:
    """Run a policy to the end of the work or of the trace; return True if the work is done."""
    for _ in run.trace.available:
        if run.machine == "spot" and not run.has_spot:
            run.machine, run.pending_s = "none", 0.0
            run.preemptions += 1
        machine = policy(run)
        if machine == "spot" and not run.has_spot:
            raise ValueError(f"{run.trace.name}: no spot at tick {run.tick}")
        if run.advance(machine):
            return True
    return False


def on_demand(run: Run) -> Machine:
    """Return on-demand in every tick."""
    return "on-demand"


def greedy(run: Run) -> Machine:
    """Return spot whenever it is available, nothing while waiting is safe, and otherwise on-demand until the end."""
    if run.machine != "none":
        return run.machine
    if run.has_spot and run.may_try_spot():
        return "spot"
    return "none" if run.may_wait() else "on-demand"


def uniform_progress(run: Run) -> Machine:
    """Return the choice of Uniform Progress with hysteresis, section 5.3 of the paper."""
    rate = run.work_s / (len(run.trace.available) * run.tick_s)
    now_s, safe = run.tick * run.tick_s, run.may_try_spot()
    if run.machine == "spot":
        return "spot"
    if run.machine == "on-demand":
        is_behind = run.done_s < (now_s + 2 * run.changeover_s) * rate
        return "spot" if run.has_spot and safe and not is_behind else "on-demand"
    if run.has_spot and safe:
        return "spot"
    if run.done_s < now_s * rate or not run.may_wait():
        return "on-demand"
    return "none"


def optimum_usd(trace: Trace, work_s: float, changeover_s: float) -> float:
    """Return the dollars of the cheapest run in hindsight, by dynamic programming backwards over ticks.

    State: machine, and units of work left including the changeover under way. Infinite if no run finishes.
    """
    unit_s = trace.tick_s / UNITS
    work, changeover = round(work_s / unit_s), round(changeover_s / unit_s)
    size = work + 2 * changeover + 2
    share = np.minimum(np.arange(size), UNITS) / UNITS * trace.tick_s / 3600
    after = np.maximum(np.arange(size) - UNITS, 0)
    idle = np.full(size, np.inf)
    idle[0] = 0.0
    spot, demand = idle.copy(), idle.copy()
    for is_available, price in zip(reversed(trace.available), reversed(trace.spot_usd), strict=True):
        on_spot = price * share + spot[after] if is_available else np.full(size, np.inf)
        on_demand_ = trace.on_demand_usd * share + demand[after]
        start = _shifted(np.minimum(on_spot, on_demand_), changeover)
        idle = np.minimum(idle, start)
        spot, demand = np.minimum(idle, on_spot), np.minimum(idle, on_demand_)
        for column in (idle, spot, demand):
            column[0] = 0.0
    return float(idle[work])


def _shifted(column: NDArray[np.float64], by: int) -> NDArray[np.float64]:
    """Return `column` shifted by `by` units to the front, with infinity at the end."""
    return np.concatenate([column[by:], np.full(by, np.inf)])
