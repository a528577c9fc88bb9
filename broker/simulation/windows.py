"""Runs one policy over windows of spot markets and compares each run with the optimum. Used by `gpubroker simulate`."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf
from typing import Literal

from broker.simulation.baselines import greedy, on_demand, uniform_progress
from broker.simulation.optimum import optimum
from broker.simulation.production import ProductionPolicy
from broker.simulation.runs import Decide, SimulatedMachine, SimulatedRun, follow
from broker.simulation.traces import Trace, TraceError

OPTIMUM = "optimum"
POLICIES: Mapping[str, Callable[[SimulatedRun], Decide]] = {
    "auto": ProductionPolicy,
    "uniform-progress": lambda run: uniform_progress,
    "greedy": lambda run: greedy,
    "on-demand": lambda run: on_demand,
}
"""Policies by name: `auto` is the daemon's own."""


@dataclass(frozen=True, kw_only=True)
class SimulatedWork:
    """The job of a simulation. Times are in seconds."""

    work_s: float
    deadline_s: float
    changeover_s: float


@dataclass(frozen=True, kw_only=True)
class WindowResult:
    """One run over one window of a market."""

    market: str
    zones: tuple[Trace, ...]
    """Traces of the window."""
    start_s: int
    usd: float
    optimum_usd: float
    on_demand_usd: float
    """Dollars of on-demand throughout."""
    is_late: bool
    preemptions: int
    starts: int
    waits: int
    """Ticks without a machine."""
    machines: tuple[SimulatedMachine | None, ...]
    """Machine of each tick until the end of the work."""

    @property
    def ratio(self) -> float:
        return self.usd / self.optimum_usd


@dataclass(frozen=True)
class Span:
    """A time with one machine, or with none."""

    machine: Literal["none", "spot", "on-demand"]
    zone: str
    from_s: int
    to_s: int


def markets(traces: Iterable[Trace], *, gpus: Sequence[str] = (), regions: Sequence[str] = ()) -> list[list[Trace]]:
    """Return the zones of each market, which sell the same machine. Raises TraceError for a name that fits no trace."""
    traces_of_gpus = _selected(list(traces), "--gpu", gpus, _is_gpu, lambda trace: trace.gpu)
    selected = _selected(traces_of_gpus, "--regions", regions, _is_in_region, lambda trace: trace.zone)
    selected.sort(key=lambda trace: (trace.market, trace.zone))
    return [list(zones) for _, zones in groupby(selected, key=lambda trace: trace.market)]


def _selected(
    traces: list[Trace],
    option: str,
    names: Sequence[str],
    fits: Callable[[Trace, str], bool],
    name_of: Callable[[Trace], str],
) -> list[Trace]:
    for name in names:
        if not any(fits(trace, name) for trace in traces):
            listed = ", ".join(sorted({name_of(trace) for trace in traces} - {""}))
            rest = f"choose among {listed}" if listed else "name the files ZONE_GPU_COUNT.csv"
            raise TraceError(f"{option} {name}: no trace fits; {rest}")
    return [trace for trace in traces if not names or any(fits(trace, name) for name in names)]


def _is_gpu(trace: Trace, name: str) -> bool:
    """Return True for a GPU such as `v100`, and for a GPU with its number such as `v100_8`."""
    return name.lower() in (trace.gpu.lower(), trace.market.lower())


def _is_in_region(trace: Trace, region: str) -> bool:
    """Return True for the zone itself and for a zone of the region: `us-west-2a`, `us-central1-a`."""
    return re.fullmatch(re.escape(region) + "(-?[a-z])?", trace.zone) is not None


def simulated(policy: str, zones: Sequence[Trace], job: SimulatedWork, count: int) -> Iterator[WindowResult]:
    """Yield the results of `count` windows of a market, evenly spaced; none if its traces are shorter than the job.

    Raises TraceError if the deadline leaves too little time.
    """
    tick_s = zones[0].tick_s
    ticks, length = int(job.deadline_s // tick_s), min(len(zone.available) for zone in zones)
    starts = sorted({round(number * (length - ticks) / max(1, count - 1)) for number in range(count)})
    for start in starts if length >= ticks else ():
        window = tuple(zone.window(start, ticks) for zone in zones)
        yield replace(_result(policy, window, job), start_s=start * tick_s)


def _result(policy: str, zones: tuple[Trace, ...], job: SimulatedWork) -> WindowResult:
    best = optimum(zones, job.work_s, job.changeover_s, plan=policy == OPTIMUM)
    if best.usd == inf:
        raise TraceError(
            f"--deadline: {len(zones[0].available)} ticks of {zones[0].tick_s} s are too few for the work "
            "and a changeover; give a later deadline"
        )
    plain = SimulatedRun(zones=zones, work_s=job.work_s, changeover_s=job.changeover_s)
    follow(on_demand, plain)
    run = SimulatedRun(zones=zones, work_s=job.work_s, changeover_s=job.changeover_s)
    decide = _planned(best.machines) if policy == OPTIMUM else POLICIES[policy](run)
    is_done = follow(decide, run)
    return WindowResult(
        market=zones[0].market, zones=zones, start_s=0, usd=run.usd, optimum_usd=best.usd, on_demand_usd=plain.usd,
        is_late=not is_done, preemptions=sum(run.preemptions), starts=run.starts, waits=run.waits,
        machines=tuple(run.machines),
    )  # fmt: skip


def _planned(machines: Sequence[SimulatedMachine | None]) -> Decide:
    """Return the policy that follows a plan."""
    return lambda run: machines[run.tick]


def spans(result: WindowResult) -> list[Span]:
    """Return the machines of a run as times, in order."""
    tick_s, merged, tick = result.zones[0].tick_s, list[Span](), 0
    for machine, ticks in groupby(result.machines):
        end = tick + len(list(ticks))
        zone = result.zones[machine.zone].zone if machine else ""
        merged.append(Span(machine.market if machine else "none", zone, tick * tick_s, end * tick_s))
        tick = end
    return merged
