"""Cost of spot policies over traces, divided by the cheapest run in hindsight: `python -m benchmarks.spot_table`.

`product` is the decision code of the daemon. A job without a machine is placed (`quote`, `choose`), and one on demand
is reviewed (`review_active`) once a tick. The time that a wait for spot leaves (`WAIT_RESERVE_SHARE`) was chosen on
`benchmarks/data/spot`, so only other traces judge the product: `--traces FOLDER`. The last line is JSON.
"""

import argparse
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from broker.cli.core.trace_files import read_traces
from broker.simulation.baselines import greedy, on_demand, uniform_progress
from broker.simulation.optimum import optimum
from broker.simulation.production import ProductionPolicy
from broker.simulation.runs import Decide, SimulatedRun, follow
from broker.simulation.traces import Trace

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


def windows(traces: Sequence[Trace], ticks: int, count: int) -> list[Trace]:
    """Return `count` windows of each trace, evenly spaced."""
    found = []
    for trace in traces:
        last = len(trace.available) - ticks
        if last >= 0:
            found += [trace.window(round(n * last / max(1, count - 1)), ticks) for n in range(count)]
    return found


def measure(
    traces: Sequence[Trace], slack: float, *, work_s: float, changeover_s: float, count: int
) -> dict[str, Totals]:
    """Return totals by policy. A miss pays the optimum's price for nothing, so its cost counts as it was."""
    totals: dict[str, Totals] = {}
    ticks = round(work_s * slack / traces[0].tick_s)
    for window in windows(traces, ticks, count):
        best = optimum([window], work_s, changeover_s).usd
        for name in policies(SimulatedRun(zones=[window], work_s=work_s, changeover_s=changeover_s)):
            run = SimulatedRun(zones=[window], work_s=work_s, changeover_s=changeover_s)
            is_done = follow(policies(run)[name], run)
            total = totals.setdefault(name, Totals({}))
            total.by_trace.setdefault(window.name, []).append(run.usd / best)
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
    rng, single, uniform, misses, count = random.Random(1), {}, {}, 0, 0
    print(f"{len(traces)} traces, {args.hours:g} h of work, {args.changeover_hours:g} h a changeover; cost / optimum")
    for slack in SLACKS:
        totals = measure(
            traces, slack, work_s=args.hours * 3600, changeover_s=args.changeover_hours * 3600, count=args.windows
        )
        for name, total in totals.items():
            low, high = interval(total.by_trace, rng)
            print(
                f"slack {slack:<4g} {name:26} {total.mean():.3f} [{low:.3f}, {high:.3f}]  misses {total.misses}, "
                f"preemptions {total.preemptions}, ticks waited {total.waits}, n {len(total.ratios)}"
            )
        single[str(slack)] = round(totals["product"].mean(), 4)
        uniform[str(slack)] = round(totals["uniform progress"].mean(), 4)
        misses += totals["product"].misses
        count += len(totals["product"].ratios)
    print(json.dumps({"single": single, "multi": None, "misses": misses, "n": count, "uniform_progress": uniform}))


if __name__ == "__main__":
    main()
