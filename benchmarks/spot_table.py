"""Cost of spot policies over traces, divided by the cheapest run in hindsight: `python -m benchmarks.spot_table`.

`product` is the decision code of the daemon: placement (`quote`, `choose`) and, once a tick, the review of a running
job (`review_active`). The priors of `broker.estimator.spot_hazards` were fitted on K80 and V100 traces, see there;
H100 traces and `--traces FOLDER` judge the product. The last line is JSON.

`single`: one zone. `multi`: all zones of a market, one machine. `nodes`: all zones, several machines (`_h100_1x4`).
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

from broker.cli.core.trace_files import read_traces
from broker.quote.spot.plan import SpotPlan, SpotPlanKey
from broker.quote.spot.review import ActiveReview, Move, Stay, review_active
from broker.simulation import production
from broker.simulation.baselines import greedy, on_demand, uniform_progress
from broker.simulation.optimum import optimum
from broker.simulation.production import ProductionPolicy
from broker.simulation.runs import Decide, SimulatedRun, follow
from broker.simulation.traces import Trace
from broker.simulation.windows import markets

TRACES = Path(__file__).parent / "data" / "spot"
SLACKS = (1.2, 1.5, 2.0)
DRAWS = 1000
"""Number of draws of a bootstrap."""
LARGEST_PLAN = SpotPlanKey(
    horizon_min=96 * 60.0, slack_min=48 * 60.0, changeover_min=6.6, price=0.35, fall=0, rise=0, alone=0.01
)
Intervals = Mapping[str, Sequence[float]]
"""Values of the windows of each trace, by its name."""


@dataclass(frozen=True, kw_only=True)
class TableJob:
    """The job of all runs of a table, in seconds."""

    work_s: float
    changeover_s: float


@dataclass(frozen=True, kw_only=True)
class Cell:
    """All policies on one window of a market at one slack."""

    zones: Sequence[Trace]
    past: Sequence[Trace]
    """The same zones before the window; empty at the beginning of a trace."""
    slack: float
    job: TableJob


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """One run of one policy."""

    ratio: float
    """Cost divided by that of the optimum. The cost of a miss counts as it was."""
    is_late: bool
    preemptions: int
    waits: int


@dataclass
class Totals:
    """Costs of one policy over windows, divided by the optimum."""

    by_trace: dict[str, list[float]] = field(default_factory=dict)
    """Ratios of the windows of each trace, by its name."""
    misses: int = 0
    preemptions: int = 0
    waits: int = 0

    @property
    def count(self) -> int:
        return sum(map(len, self.by_trace.values()))

    def mean(self) -> float:
        return mean(self.by_trace) if self.by_trace else float("nan")

    def add(self, trace: str, result: CellResult) -> None:
        """Add a window of a trace."""
        self.by_trace.setdefault(trace, []).append(result.ratio)
        self.misses += result.is_late
        self.preemptions += result.preemptions
        self.waits += result.waits


POLICIES: Mapping[str, Callable[[SimulatedRun, Sequence[Trace]], Decide]] = {
    "product": lambda run, past: ProductionPolicy(run, past=past),
    "product, no history": lambda run, past: ProductionPolicy(run),
    "product, speed unchecked": lambda run, past: ProductionPolicy(run, past=past, knows_speed=False),
    "product, no review": lambda run, past: ProductionPolicy(run, past=past, reviews=False),
    "uniform progress": lambda run, past: uniform_progress,
    "greedy": lambda run, past: greedy,
    "on demand": lambda run, past: on_demand,
}
DEFAULT_POLICIES = ("product", "product, no history", "uniform progress", "greedy", "on demand")
LABELS = {"single": "one zone", "multi": "several zones", "nodes": "several nodes"}


def cells(groups: Iterable[Sequence[Trace]], slack: float, job: TableJob, count: int) -> list[Cell]:
    """Return `count` windows of each market, evenly spaced; none of a market whose traces are too short."""
    made = []
    for zones in groups:
        ticks = round(job.work_s * slack / zones[0].tick_s)
        last = min(len(zone.available) for zone in zones) - ticks
        for start in sorted({round(n * last / max(1, count - 1)) for n in range(count)}) if last >= 0 else ():
            window = [zone.window(start, ticks) for zone in zones]
            past = [zone.window(0, start) for zone in zones] if start else []
            made.append(Cell(zones=window, past=past, slack=slack, job=job))
    return made


def measured(task: tuple[Cell, Sequence[str]]) -> dict[str, CellResult]:
    """Return the runs of policies by name over one window."""
    cell, names = task
    work_s, changeover_s = cell.job.work_s, cell.job.changeover_s
    best, results = optimum(cell.zones, work_s, changeover_s).usd, {}
    for name in names:
        run = SimulatedRun(zones=cell.zones, work_s=work_s, changeover_s=changeover_s)
        is_done = follow(POLICIES[name](run, cell.past), run)
        results[name] = CellResult(
            ratio=run.usd / best, is_late=not is_done, preemptions=sum(run.preemptions), waits=run.waits
        )
    return results


def mean(by_trace: Intervals) -> float:
    """Return the mean over all windows."""
    return statistics.fmean(ratio for ratios in by_trace.values() for ratio in ratios)


def interval(by_trace: Intervals, rng: random.Random) -> tuple[float, float]:
    """Return the 95 % interval of the mean by bootstrap over traces.

    Whole traces are drawn, because windows of one trace overlap and depend on each other.
    """
    traces = sorted(by_trace)
    draws = (rng.choices(traces, k=len(traces)) for _ in range(DRAWS))
    means = sorted(statistics.fmean(ratio for name in draw for ratio in by_trace[name]) for draw in draws)
    return means[DRAWS // 40], means[DRAWS - DRAWS // 40 - 1]


def differences(of: Intervals, others: Intervals) -> dict[str, list[float]]:
    """Return the ratios of one policy minus those of another on the same windows."""
    return {name: [a - b for a, b in zip(of[name], others[name], strict=True)] for name in of}


def table(
    label: str, groups: Sequence[Sequence[Trace]], names: Sequence[str], job: TableJob, *, windows: int, processes: int
) -> dict[str, dict[float, Totals]]:
    """Print the rows of one table as they are ready; return totals by policy and slack."""
    rng, totals = random.Random(1), {name: {slack: Totals() for slack in SLACKS} for name in names}
    with ProcessPoolExecutor(max_workers=processes, mp_context=get_context("spawn")) as pool:
        for slack in SLACKS:
            chosen = cells(groups, slack, job, windows)
            for cell, results in zip(chosen, pool.map(measured, [(cell, names) for cell in chosen]), strict=True):
                for name, result in results.items():
                    # Several zones run together, so only markets and days are independent of each other.
                    trace = cell.zones[0].name if len(cell.zones) == 1 else f"{cell.zones[0].market} {len(cell.past)}"
                    totals[name][slack].add(trace, result)
            _print_rows(label, slack, {name: totals[name][slack] for name in names if chosen}, rng)
    return totals


def _print_rows(label: str, slack: float, totals: Mapping[str, Totals], rng: random.Random) -> None:
    product_total = totals.get("product")
    for name, total in totals.items():
        low, high = interval(total.by_trace, rng)
        row = f"{label}, slack {slack:<4g} {name:26} {total.mean():.3f} [{low:.3f}, {high:.3f}]"
        if product_total is not None and name != "product":
            by_trace = differences(product_total.by_trace, total.by_trace)
            low, high = interval(by_trace, rng)
            row += f"  product {mean(by_trace):+.3f} [{low:+.3f}, {high:+.3f}]"
        counts = f"misses {total.misses}, preemptions {total.preemptions}, ticks waited {total.waits}, n {total.count}"
        print(f"{row}  {counts}", flush=True)


def sampled(groups: Sequence[Sequence[Trace]], most: int) -> list[Sequence[Trace]]:
    """Return at most `most` markets, drawn by a fixed seed."""
    return random.Random(1).sample(list(groups), most) if len(groups) > most else list(groups)


def decision_cost(zones: int = 8) -> dict[str, float]:
    """Return CPU seconds and megabytes of the largest plan, and CPU milliseconds of a review with a cached plan."""
    began = time.process_time()
    plan = SpotPlan(LARGEST_PLAN)
    plan_s = time.process_time() - began
    down, up = (False,) * 12, (True, False, False, False) * 6
    traces = [
        Trace(name=f"z{n}", tick_s=600, available=down + up, spot_usd=(1.0,) * 36, on_demand_usd=2.0)
        for n in range(zones)
    ]
    run, times = SimulatedRun(zones=traces, work_s=5 * 3600, changeover_s=360), list[float]()
    review = review_active

    def timed(facts: ActiveReview) -> Move | Stay:
        review(facts)  # builds the plan if it is not cached
        started = time.process_time()
        decision = review(facts)
        times.append((time.process_time() - started) * 1000)
        return decision

    with patch.object(production, "review_active", timed):
        follow(ProductionPolicy(run), run)
    review_ms = statistics.median(times) if times else float("nan")
    return {"plan_s": round(plan_s, 2), "plan_mb": round(len(plan.packed()) / 1e6, 1), "review_ms": round(review_ms, 2)}


def summary(tables: Mapping[str, Mapping[str, Mapping[float, Totals]]]) -> dict[str, object]:
    """Return the figures of the last line: means by slack, with misses and the number of runs of the product."""
    figures = dict[str, object]()
    for key, totals in tables.items():
        figures[key] = _means(totals.get("product", {}))
    for key, totals in tables.items():
        name = "uniform_progress" if key == "single" else f"uniform_progress_{key}"
        figures[name] = _means(totals.get("uniform progress", {}))
    runs = [total for totals in tables.values() for total in totals.get("product", {}).values()]
    return figures | {"misses": sum(total.misses for total in runs), "n": sum(total.count for total in runs)}


def _means(totals: Mapping[float, Totals]) -> dict[str, float] | None:
    """Return means by slack; None: no trace is long enough, or there is no such market."""
    return {str(slack): round(total.mean(), 4) for slack, total in totals.items() if total.count} or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of ZONE_GPU_COUNT.csv files")
    parser.add_argument("--windows", type=int, default=2, help="windows of each market")
    parser.add_argument("--pools", type=int, default=12, help="markets of each table, drawn by a fixed seed")
    parser.add_argument("--hours", type=float, default=48.0, help="hours of work")
    parser.add_argument("--changeover-hours", type=float, default=0.1)
    parser.add_argument("--tick-s", type=int, default=600)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tables", default="single,multi,nodes")
    parser.add_argument("--policies", default="", help=f"separated by semicolons, out of: {'; '.join(POLICIES)}")
    args = parser.parse_args()
    traces = read_traces(args.traces, args.tick_s)
    job = TableJob(work_s=args.hours * 3600, changeover_s=args.changeover_hours * 3600)
    names = [name.strip() for name in args.policies.split(";") if name.strip()] or list(DEFAULT_POLICIES)
    print(f"{len(traces)} traces, {args.hours:g} h of work, {args.changeover_hours:g} h a changeover; cost / optimum")
    several = [zones for zones in markets(traces) if len(zones) > 1]
    groups = {
        "single": [[trace] for trace in traces if trace.nodes == 1],
        "multi": [zones for zones in several if zones[0].nodes == 1],
        "nodes": [zones for zones in several if zones[0].nodes > 1],
    }
    chosen = [key for key in args.tables.split(",") if key in groups]
    print(json.dumps({"decision": decision_cost()}), flush=True)
    tables = {
        key: table(
            LABELS[key], sampled(groups[key], args.pools), names, job, windows=args.windows, processes=args.processes
        )
        for key in chosen
    }
    print(json.dumps(summary(tables)))


if __name__ == "__main__":
    main()
