"""Measure a job from submit to its first step on each emulated cloud, and from an eviction to the next new step.

    python -m benchmarks.launch [--cloud aws] [--rounds 3] [--quick] [--memory]

A real daemon, SkyPilot's real API server and the real trainer (SmolLM2-135M on the CPU) run on machines of emulated
clouds. All machines share this host's cores; the daemon's intervals are its defaults. Then the same API server launches
the same purchase and task without the broker, which shows the broker's overhead. The first measurement is the daemon's
cost of polling all prices; the last, with `--memory`, is the cost of many launches at once. `--quick`: one round of one
cloud only. A failed part is reported and the others continue. The last line is JSON.
"""

import argparse
import asyncio
import json
import platform
import statistics
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks import bare, crowd, offers
from benchmarks.stages import AFTER_BOOT, first_step, launched, medians, seconds, split, table
from broker.api.schemas.jobs import AttemptView, JobDetail
from broker.daemon.config import IntervalsConfig, LimitsConfig
from providers.registry import CLOUD_CLASSES
from tests.clouds.scenarios.scene import Scene, fine_tune
from tests.clouds.state import Rented

DATA = Path("examples/devils-dictionary.csv")
ROWS, STEPS = 80, 2000
"""Rows and steps of the job, which is cancelled after its measurement."""
NOTICE_S = 120.0


@dataclass(kw_only=True)
class Round:
    """One job on one cloud."""

    launch: dict[str, float]
    resume: dict[str, float]
    daemon_s: float
    """Seconds from create_sent_at to `attempt.booting`."""
    sky_s: float
    """Seconds of SkyPilot's request from its arrival to its end, a part of `daemon_s`."""
    offer: str
    """Id of the offer that the first attempt bought."""


@dataclass(kw_only=True)
class Measured:
    """All rounds of one cloud."""

    rounds: list[Round] = field(default_factory=list)
    bare_s: list[float] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = {"rounds": len(self.rounds)}
        for way in ("launch", "resume"):
            runs = [getattr(round_, way) for round_ in self.rounds]
            document[way] = medians(runs) | {
                "all_s": round(statistics.median(sum(run.values()) for run in runs), 2),
                "after_boot_s": round(statistics.median(sum(run[name] for name in AFTER_BOOT) for run in runs), 2),
            }
        return document | {"overhead": self.overhead()}

    def overhead(self) -> dict[str, float]:
        """Return the seconds that the broker adds to SkyPilot's launch, before its request and around the request.

        `added_by_bare_s` is a cross-check by bare launches. It is noisy, because SkyPilot's time varies by more.
        """
        before = statistics.median(round_.launch["quote"] + round_.launch["intent"] for round_ in self.rounds)
        around = statistics.median(round_.daemon_s - round_.sky_s for round_ in self.rounds)
        figures = {"quote_and_intent_s": before, "around_request_s": around, "added_s": before + around}
        figures["daemon_s"] = statistics.median(round_.daemon_s for round_ in self.rounds)
        if self.bare_s:
            figures["bare_s"] = statistics.median(self.bare_s)
            figures["added_by_bare_s"] = before + figures["daemon_s"] - figures["bare_s"]
        return {name: round(value, 2) for name, value in figures.items()}


# ---------------------------------------------------------------------------------------------------------- one job


async def one_round(scene: Scene, cloud: str) -> Round:
    """Run a job to its first step, evict its machine, and run the job to its next step."""
    await bare.wait_until_idle(scene)
    rows = DATA.read_bytes().splitlines(keepends=True)[:ROWS]
    begun = scene.clouds.world.now().timestamp()
    spec = fine_tune(scene.hub.url, steps=STEPS, resources={"providers": [cloud]})
    job = await scene.submit(spec, b"".join(rows))
    try:
        machine, step_at = await first_step(scene, job)
        detail = await scene.until(job, "a checkpoint", _saved)
        before, taken_at = len(detail.runs), scene.clouds.world.now().timestamp()
        await evict(scene, machine)
        other, again_at = await first_step(scene, job, after=before)
        detail = await scene.job(job)
        run, events = detail.runs[before - 1], await scene.events(job)
        booting = next(e.at for e in events if e.kind == "attempt.booting" and e.attempt_id == run.id)
        noticed = next(e.at for e in events if e.attempt_id == run.id and seconds(e.at) >= taken_at)
        lost = [("noticed", seconds(noticed)), ("ended", seconds(run.ended_at))]
        return Round(
            launch=split(begun, launched(scene, run, machine, step_at)),
            resume=split(taken_at, lost + launched(scene, _of(detail, other), other, again_at)),
            daemon_s=seconds(booting) - seconds(run.create_sent_at),
            sky_s=await bare.request_s(scene, run.instance),
            offer=run.offer.id,
        )
    finally:
        await crowd.end(scene, job)


def _saved(detail: JobDetail) -> bool:
    return bool(detail.runs and detail.runs[-1].beat and detail.runs[-1].beat.checkpoint)


def _of(detail: JobDetail, rented: Rented) -> AttemptView:
    return next(run for run in detail.runs if rented.name.startswith(run.instance))


async def evict(scene: Scene, machine: Rented) -> None:
    if machine.cloud == "aws":
        await scene.aws.preempt(machine.id, notice_s=NOTICE_S)
    else:
        await scene.clouds.control.preempt(machine.id)


# -------------------------------------------------------------------------------------------------------- all of it


class Report:
    """Measurements, and the parts that failed."""

    def __init__(self) -> None:
        self.document: dict[str, Any] = {}
        self.failed: dict[str, str] = {}

    async def part(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run one part. A failed part is reported, and the next is run."""
        begun = time.monotonic()
        print(f"{name} …", flush=True)
        try:
            await work()
        except Exception as e:
            self.failed[name] = f"{type(e).__name__}: {e}".splitlines()[0]
            traceback.print_exc()
        print(f"{name}: {'failed' if name in self.failed else 'done'}, {time.monotonic() - begun:.0f} s", flush=True)


async def clouds(report: Report, names: list[str], rounds: int) -> None:
    """Run every round of every cloud in one installation."""
    intervals, limits = IntervalsConfig().model_dump(), LimitsConfig().model_dump()
    measured = {name: Measured() for name in names}
    async with Scene(clouds=tuple(names), intervals=intervals, limits=limits) as scene:
        await report.part("a first launch, which starts the server", partial(_warm, scene, names[0], report))
        for name, into in measured.items():
            for number in range(1, rounds + 1):
                await report.part(f"{name}, round {number}", partial(_round, scene, name, into))
            for number in range(1, rounds + 1):
                await report.part(f"{name} without the broker, round {number}", partial(_bare, scene, name, into))
    measured = {name: cloud for name, cloud in measured.items() if cloud.rounds}
    report.document["clouds"] = {name: cloud.document() for name, cloud in measured.items()}
    for way, title in (("launch", "submit → first step"), ("resume", "eviction → first new step")):
        columns = {name: medians([getattr(r, way) for r in cloud.rounds]) for name, cloud in measured.items()}
        print(table(f"{title}, seconds", columns))
    for name, cloud in measured.items():
        print(f"{name}: seconds that the broker adds: {cloud.overhead()}")


async def _warm(scene: Scene, cloud: str, report: Report) -> None:
    begun = time.monotonic()
    job = await crowd.submit_idle(scene, cloud)
    try:
        await crowd.beating(scene, [job])
        report.document["first_launch_s"] = round(time.monotonic() - begun, 1)
    finally:
        await crowd.end(scene, job)


async def _round(scene: Scene, cloud: str, into: Measured) -> None:
    into.rounds.append(await one_round(scene, cloud))


async def _bare(scene: Scene, cloud: str, into: Measured) -> None:
    if not into.rounds:
        raise RuntimeError("no round with the broker succeeded, so there is no offer to launch")
    into.bare_s.append(await bare.launch(scene, cloud, into.rounds[-1].offer))


async def prices(report: Report) -> None:
    report.document["offers"] = await offers.measure(5000, 10)


async def crowds(report: Report) -> None:
    report.document["crowds"] = []
    for count in (1, 4, 20):
        report.document["crowds"].append(await crowd.measure(count))


def machine() -> dict[str, Any]:
    """Return the machine and the time of the measurement."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ""
    )
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "cores": psutil.cpu_count(),
        "cpu": cpu,
        "gb": round(psutil.virtual_memory().total / 1e9),
        "python": platform.python_version(),
        "load": psutil.getloadavg()[0],
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


async def run(given: argparse.Namespace) -> int:
    report = Report()
    report.document["machine"] = machine()
    print(report.document["machine"], flush=True)
    names = given.cloud or list(CLOUD_CLASSES)
    if given.quick:
        names, given.rounds = names[:1], 1
    else:
        await report.part("prices of all clouds", partial(prices, report))
    await report.part("clouds", partial(clouds, report, names, given.rounds))
    if given.memory and not given.quick:
        await report.part("many launches at once", partial(crowds, report))
    report.document["failed"] = report.failed
    print(json.dumps(report.document))
    return 1 if report.failed else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cloud",
        action="append",
        choices=list(CLOUD_CLASSES),
        help="a cloud to measure; repeat for more; default: all four",
    )
    parser.add_argument("--rounds", type=int, default=1, help="rounds of each cloud; figures are medians")
    parser.add_argument("--memory", action="store_true", help="also 1, 4 and 20 launches at once (20 minutes more)")
    parser.add_argument("--quick", action="store_true", help="one round of one cloud (the first --cloud)")
    raise SystemExit(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
