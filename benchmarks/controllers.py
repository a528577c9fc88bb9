"""Jobs queued → virtual run → succeeded, on one broker process and embedded PostgreSQL.

    python -m benchmarks.controllers --jobs 10000

Everything is real but the machines: PostgreSQL with fsync, the controllers with their production code, a blob store in
memory. Machines are virtual: they read their spec, beat, commit a final checkpoint and end. The last line is JSON.

`slope`: CPU seconds per job for the second quarter of the jobs, when the queue is long, over those for the last one.
1.0: a job costs the same however many wait.
"""

import argparse
import asyncio
import json
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from broker.blobs import ObstoreBlobs
from broker.controllers.base.context import ControllerContext, Intervals
from broker.controllers.fleet import Fleet
from broker.controllers.market.poller import MarketIntervals, MarketPoller
from broker.domain.ids import Installation, job_id
from broker.domain.job import TERMINAL_JOB_STATES, Job
from broker.domain.spec import JobSpec
from broker.domain.workload import Workload
from broker.runtime.clock import SystemClock
from broker.runtime.secret_box import SecretBox
from broker.store.embedded.server import EmbeddedPostgres
from broker.store.migrate import migrate
from broker.store.postgres.store import PostgresStore
from providers.simulated.config import SimulatedConfig
from providers.simulated.provider import SimulatedProvider
from providers.simulated.virtual_backend import VirtualBackend

INSTALLATION = Installation("bnch")
SUBMIT_AT_ONCE = 200


def _job() -> Job:
    spec = JobSpec.model_validate(
        {"name": "bench", "cap_usd": "5", "script": {"code": "upload:" + "0" * 64, "command": ["true"]}}
    )
    return Job(
        id=job_id(os.urandom(9)),
        owner="bench",
        spec=spec,
        workload=Workload(shape=None, method="script"),
        created_at=SystemClock().now(),
        cap_usd=spec.cap_usd,
    )


async def _queue(store: PostgresStore, jobs: int) -> None:
    for first in range(0, jobs, SUBMIT_AT_ONCE):
        batch = [_job() for _ in range(min(SUBMIT_AT_ONCE, jobs - first))]
        await asyncio.gather(*(store.submit(j, key=None, body_sha256="", events=()) for j in batch))


async def _done(store: PostgresStore) -> dict[str, int]:
    counts = (await store.counts())["jobs"]
    return {state: n for state, n in counts.items() if state in {s.value for s in TERMINAL_JOB_STATES}}


def _fleet(store: PostgresStore, state: Path, run_s: float) -> tuple[Fleet, SimulatedProvider, MarketPoller]:
    clock = SystemClock()
    blobs = ObstoreBlobs.open("memory://", INSTALLATION)
    config = SimulatedConfig.model_validate(
        {
            "body": "virtual",
            "hazard_scale": 0,
            "sold_out": 0,
            "virtual": {"run_s": run_s, "boot_s": 0.2, "beat_s": 5, "tick_s": 0.1},
        }
    )
    body = VirtualBackend(blobs, clock, config.virtual, seed=1)
    provider = SimulatedProvider(config, body, installation=INSTALLATION, state=state, clock=clock)
    market = MarketPoller({"simulated": provider}, clock, MarketIntervals())
    context = ControllerContext(
        installation=INSTALLATION,
        owner="bench",
        store=store,
        blobs=blobs,
        providers={"simulated": provider},
        clock=clock,
        intervals=Intervals(poll_s=0.05, look_s=0.5, list_s=0.1, billing_s=2, sweep_s=10, creates=200),
    )
    return Fleet.build(context, SecretBox(bytes(32)), market.offers, ()), provider, market


def _cpu_s_per_job(spent: Sequence[tuple[int, float]], since: float, until: float, jobs: int) -> float:
    """Return the CPU seconds of a job between two shares of all jobs. `spent`: (jobs done, CPU seconds) over time."""
    first = max((entry for entry in spent if entry[0] <= since * jobs), default=spent[0])
    last = min((entry for entry in spent if entry[0] >= until * jobs), default=spent[-1])
    return (last[1] - first[1]) / max(1, last[0] - first[0])


async def measure(jobs: int, run_s: float) -> dict[str, float]:
    """jobs_per_s from the start of the controllers to the last terminal state."""
    me = psutil.Process()
    with tempfile.TemporaryDirectory(prefix="gb-") as folder:
        async with await EmbeddedPostgres.start(Path(folder) / "pg") as server:
            await migrate(server.dsn)
            store = await PostgresStore.connect(server.dsn)
            for status in await store.channels():
                await store.write_channel(replace(status.channel, enabled=False))
            await _queue(store, jobs)
            fleet, provider, market = _fleet(store, Path(folder), run_s)
            await market.step()
            begun, cpu = time.perf_counter(), sum(me.cpu_times()[:2])
            work = asyncio.create_task(fleet.run())
            done: dict[str, int] = {}
            spent = [(0, 0.0)]
            while sum(done.values()) < jobs and not work.done():
                await asyncio.sleep(0.5)
                done = await _done(store)
                spent.append((sum(done.values()), sum(me.cpu_times()[:2]) - cpu))
                print(f"{time.perf_counter() - begun:6.1f} s  {sum(done.values()):6d} of {jobs}", flush=True)
            took, used = time.perf_counter() - begun, sum(me.cpu_times()[:2]) - cpu
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await provider.close()
            await store.close()
    return {
        "jobs": jobs,
        "succeeded": done.get("succeeded", 0),
        "seconds": round(took, 2),
        "jobs_per_s": round(jobs / took, 1),
        "broker_cpu_s": round(used, 2),
        "slope": round(_cpu_s_per_job(spent, 0.25, 0.5, jobs) / _cpu_s_per_job(spent, 0.75, 1.0, jobs), 2),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--run-s", type=float, default=1.0, help="seconds that each virtual run takes")
    given = parser.parse_args()
    print(json.dumps(asyncio.run(measure(given.jobs, given.run_s))))


if __name__ == "__main__":
    main()
