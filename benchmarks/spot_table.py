"""Cost of spot policies over traces, divided by the cheapest run in hindsight: `python -m benchmarks.spot_table`.

`product` is the decision code of the daemon. A job without a machine is placed (`quote`, `choose`), and one on demand
is reviewed (`review_active`) once a tick. The priors of `broker.estimator.spot_hazards` were fitted on traces that
include `benchmarks/data/spot`, so only other traces judge the product: `--traces FOLDER`. The last line is JSON.

`single` runs each trace alone. `multi` lets a job use all zones of a market, with one machine at a time; null if no
market has two zones. Files `ZONE_GPU_COUNT.csv` with the same GPU and count are one market.
"""

import argparse
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from broker.cli.core.trace_files import read_traces
from broker.simulation.baselines import greedy, on_demand, uniform_progress
from broker.simulation.optimum import optimum
from broker.simulation.production import ProductionPolicy
from broker.simulation.runs import Decide, SimulatedRun, follow
from broker.simulation.traces import Trace
from broker.simulation.windows import markets

TRACES = Path(__file__).parent / "data" / "spot"
SLACKS = (1.2, 1.5, 2.0)


@dataclass
class Totals:
    """Costs of one policy over windows, divided by the optimum."""

    by_trace: dict[str, list[float]]
    """Ratios of the windows of each trace, by its name."""
    misses: int = 0
    preemptions: int = 0
    waits: int = 0

    @property
    def ratios(self) -> list[float]:
        return list(chain.from_iterable(self.by_trace.values()))

    def mean(self) -> float:
        return statistics.fmean(self.ratios) if self.by_trace else float("nan")


def policies(run: SimulatedRun) -> dict[str, Decide]:
    return {
        "product": ProductionPolicy(run),
        "product, speed unchecked": ProductionPolicy(run, knows_speed=False),
        "product, no review": ProductionPolicy(run, reviews=False),
        "uniform progress": uniform_progress,
        "greedy": greedy,
        "on demand": on_demand,
    }


def windows(market: Sequence[Trace], ticks: int, count: int) -> list[list[Trace]]:
    """Return `count` windows of the zones of a market, evenly spaced; none if a trace is too short."""
    last = min(len(zone.available) for zone in market) - ticks
    starts = [round(n * last / max(1, count - 1)) for n in range(count)] if last >= 0 else []
    return [[zone.window(start, ticks) for zone in market] for start in starts]


def measure(
    groups: Sequence[Sequence[Trace]], slack: float, *, work_s: float, changeover_s: float, count: int
) -> dict[str, Totals]:
    """Return totals by policy over markets, whose zones a run may use together.

    A miss pays the optimum's price for nothing, so its cost counts as it was.
    """
    totals: dict[str, Totals] = {}
    ticks = round(work_s * slack / groups[0][0].tick_s)
    for window in chain.from_iterable(windows(group, ticks, count) for group in groups):
        best = optimum(window, work_s, changeover_s).usd
        for name in policies(SimulatedRun(zones=window, work_s=work_s, changeover_s=changeover_s)):
            run = SimulatedRun(zones=window, work_s=work_s, changeover_s=changeover_s)
            is_done = follow(policies(run)[name], run)
            total = totals.setdefault(name, Totals({}))
            total.by_trace.setdefault(window[0].name, []).append(run.usd / best)
            total.misses += not is_done
            total.preemptions += sum(run.preemptions)
            total.waits += run.waits
    return totals


def interval(by_trace: Mapping[str, Sequence[float]], rng: random.Random) -> tuple[float, float]:
    """Return the 95 % interval of the mean by bootstrap over traces.

    Whole traces are drawn, because windows of one trace overlap and depend on each other.
    """
    traces = sorted(by_trace)
    draws = (rng.choices(traces, k=len(traces)) for _ in range(1000))
    means = sorted(statistics.fmean(ratio for name in draw for ratio in by_trace[name]) for draw in draws)
    return means[25], means[974]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--windows", type=int, default=12, help="windows of each trace")
    parser.add_argument("--hours", type=float, default=48.0, help="hours of work")
    parser.add_argument("--changeover-hours", type=float, default=0.1)
    parser.add_argument("--tick-s", type=int, default=600)
    args = parser.parse_args()
    traces = read_traces(args.traces, args.tick_s)
    job = {"work_s": args.hours * 3600, "changeover_s": args.changeover_hours * 3600, "count": args.windows}
    print(f"{len(traces)} traces, {args.hours:g} h of work, {args.changeover_hours:g} h a changeover; cost / optimum")
    single = _table([[trace] for trace in traces], "one zone", **job)
    groups = [group for group in markets(traces) if len(group) > 1]
    several = _table(groups, "several zones", **job) if groups else {}
    figures = {"single": single["product"], "multi": several.get("product"), "misses": single["misses"]}
    figures |= {"n": single["n"], "uniform_progress": single["uniform progress"]}
    if groups:
        figures |= {"multi_n": several["n"], "multi_misses": several["misses"]}
        figures |= {"multi_uniform_progress": several["uniform progress"]}
    print(json.dumps(figures))


def _table(groups: Sequence[Sequence[Trace]], label: str, **job: Any) -> dict[str, Any]:
    """Print the lines of one table; return means by slack for two policies, misses and the number of runs."""
    rng, misses, count = random.Random(1), 0, 0
    means: dict[str, dict[str, float]] = {"product": {}, "uniform progress": {}}
    for slack in SLACKS:
        totals = measure(groups, slack, **job)
        for name, total in totals.items():
            low, high = interval(total.by_trace, rng)
            print(
                f"{label}, slack {slack:<4g} {name:26} {total.mean():.3f} [{low:.3f}, {high:.3f}]  "
                f"misses {total.misses}, preemptions {total.preemptions}, ticks waited {total.waits}, "
                f"n {len(total.ratios)}"
            )
        for name, column in means.items():
            column[str(slack)] = round(totals[name].mean(), 4)
        misses += totals["product"].misses
        count += len(totals["product"].ratios)
    return {**means, "misses": misses, "n": count}


if __name__ == "__main__":
    main()
