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
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import chain
from pathlib import Path

from benchmarks.quote import LLAMA_3_8B
from benchmarks.spot_traces import (
    Machine,
    Policy,
    Run,
    Trace,
    follow,
    greedy,
    on_demand,
    optimum_usd,
    read_trace,
    uniform_progress,
)
from broker.domain.instance import Caps
from broker.domain.job import Attempt
from broker.domain.offer import Offer, Quote, QuoteLine
from broker.domain.spec import JobSpec
from broker.domain.workload import SpotHours, Workload
from broker.estimator.planning.corrections import Corrections
from broker.quote.engine import quote
from broker.quote.placement import choose
from broker.quote.placement_facts import PlacementSettings
from broker.quote.spot.review import ActiveReview, Move, review_active
from tests.support import build
from trainer.contract.documents import CheckpointRef, Heartbeat

TRACES = Path(__file__).parent / "data" / "spot"
SLACKS = (1.2, 1.5, 2.0)
START = datetime(2026, 1, 1, tzinfo=UTC)
MONEY = Decimal(1_000_000)
WORK = Workload(
    shape=LLAMA_3_8B, method="lora", lora_r=16, gradient_checkpointing=True, micro_batch=1, global_batch=32,
    sequence=16_384, tokens_per_row=16_000, steps=1000, eval_rows=0,
)  # fmt: skip
SPEED_RUNS = [(("h100-sxm", "lora", "llama"), 0.0)] * 8
"""Runs whose speed was as estimated, so that the interval of the speed is narrow."""


@dataclass
class Product:
    """The daemon's decisions for one job."""

    trace: Trace
    run: Run
    knows_speed: bool = True
    reviews: bool = True
    _began_tick: int = 0
    """Tick in which the current machine was bought."""

    def __post_init__(self) -> None:
        base = Offer(
            id="on-demand", provider="cloud", cloud="cloud", region="zone", instance_type="1xH100",
            accelerator="h100-sxm", gpus=1, gpu_memory_bytes=80 << 30, vcpus=26, ram_bytes=200 << 30,
            disk_bytes=10**12, spot=False, usd_per_hour=Decimal(str(self.trace.on_demand_usd)), seen_at=START,
        )  # fmt: skip
        self._on_demand = base
        self._spot = replace(base, id="spot", spot=True, on_demand_usd_per_hour=base.usd_per_hour)
        self._line = self._quote(Caps(spot=True), WORK, [base], spots={}, deadline_s=None).lines[0]
        hours = self._line.hours
        assert hours is not None
        self._caps = Caps(spot=True, boot_s=max(1.0, self.run.changeover_s - hours.load * 3600))
        self._step_s = hours.training * 3600 / WORK.steps

    def __call__(self, run: Run) -> Machine:
        """Return the machine that placement buys now, or that the review of a live one moves to."""
        if run.machine == "spot" or (run.machine == "on-demand" and not (self.reviews and self._moves(run))):
            return run.machine
        line = self._placed(run)
        self._began_tick = run.tick
        if line is None:
            return "none"
        return "spot" if line.offer.spot else "on-demand"

    def _placed(self, run: Run) -> QuoteLine | None:
        made = self._quote(
            self._caps,
            self._work(run),
            self._offers(run),
            spots=self._history(run),
            deadline_s=run.time_left_s,
            excluded={} if run.has_spot else {"spot": "sold out"},
        )
        return choose(made, cap_left=MONEY, attempt_number=1, least=lambda line: Decimal(0)).line

    def _offers(self, run: Run) -> list[Offer]:
        price = Decimal(str(round(run.trace.spot_usd[run.tick], 4)))
        return [replace(self._spot, usd_per_hour=price), self._on_demand]

    def _work(self, run: Run) -> Workload:
        return replace(WORK, steps=max(1, round(run.left_s / self._step_s)))

    def _moves(self, run: Run) -> bool:
        """Return True if the review moves the attempt on demand, which has saved all of its steps."""
        if not run.has_spot:
            return False
        now = START
        began = now - timedelta(seconds=(run.tick - self._began_tick) * run.tick_s)
        saved = CheckpointRef(manifest="m", step=1, save_s=10, stall_s=1, bytes=1)
        attempt = build.attempt(
            line=self._line,
            first_beat_at=began,
            create_sent_at=began,
            beat=Heartbeat(attempt="a" * 13, boot="b", seq=1, step=1, total_steps=WORK.steps, checkpoint=saved),
        )
        return isinstance(review_active(self._review(run, attempt)), Move)

    def _review(self, run: Run, attempt: Attempt) -> ActiveReview:
        work = self._work(run)
        job = replace(
            build.active_job(cap_usd=MONEY),
            spec=self._spec(run.time_left_s),
            workload=replace(work, steps=work.steps + 1),
        )
        return ActiveReview(
            job=job,
            attempt=attempt,
            now=START,
            settings=PlacementSettings(
                installation=build.INSTALLATION, caps={"cloud": self._caps}, drain_budget=build.drain_budget()
            ),
            offers=self._offers(run),
            learned=self._learned(self._history(run)),
            policies_at=START,
        )

    def _history(self, run: Run) -> dict[tuple[str, str, str, str], SpotHours]:
        if not run.spot_s:
            return {}
        hours = SpotHours(
            provider="cloud", cloud="cloud", region="zone", accelerator="h100-sxm", hours=run.spot_s / 3600,
            preemptions=run.preemptions,
        )  # fmt: skip
        return {(hours.provider, hours.cloud, hours.region, hours.accelerator): hours}

    def _quote(
        self,
        caps: Caps,
        work: Workload,
        offers: Sequence[Offer],
        *,
        spots: Mapping[tuple[str, str, str, str], SpotHours],
        deadline_s: float | None,
        excluded: Mapping[str, str] | None = None,
    ) -> Quote:
        return quote(
            self._spec(deadline_s), work, offers, now=START, local_files=False, scoped_store=True, spent=Decimal(0),
            cap_left=MONEY, excluded=excluded or {}, caps={"cloud": caps}, learned=self._learned(spots),
        )  # fmt: skip

    def _learned(self, spots: Mapping[tuple[str, str, str, str], SpotHours]) -> Corrections:
        return Corrections(speeds={"h100-sxm": SPEED_RUNS} if self.knows_speed else {}, spots=dict(spots))

    def _spec(self, deadline_s: float | None) -> JobSpec:
        spec = {
            "name": "benchmark",
            "cap_usd": str(MONEY),
            "train": {"model": LLAMA_3_8B.name, "data": {"path": "rows.csv", "completion": "{text}"}},
            "resources": {"gpus": 1},
        }
        if deadline_s is not None:
            spec["deadline"] = (START + timedelta(seconds=deadline_s)).isoformat()
        return JobSpec.model_validate(spec)


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


def policies(trace: Trace, run: Run) -> dict[str, Policy]:
    return {
        "product": Product(trace, run),
        "product, speed unchecked": Product(trace, run, knows_speed=False),
        "product, no review": Product(trace, run, reviews=False),
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
        best = optimum_usd(window, work_s, changeover_s)
        for name in policies(window, Run(trace=window, work_s=work_s, changeover_s=changeover_s)):
            run = Run(trace=window, work_s=work_s, changeover_s=changeover_s)
            is_done = follow(policies(window, run)[name], run)
            total = totals.setdefault(name, Totals({}))
            total.by_trace.setdefault(window.name.rpartition("@")[0], []).append(run.usd / best)
            total.misses += not is_done
            total.preemptions += run.preemptions
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
    files = sorted(path for path in args.traces.iterdir() if path.name.endswith((".csv", ".csv.gz")))
    traces = [read_trace(path, args.tick_s) for path in files]
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
