"""Keep many running attempts with deadlines on one broker: `python -m benchmarks.active --attempts 10000`.

The last line is JSON: `cpu_share` is the broker's CPU time over wall time, `late` counts reviews and charges that came
later than their rhythm. PostgreSQL runs with fsync. All controllers run with their production code and intervals. Left
out are the machines: another process writes their heartbeats into the blob store, and a listing costs no call.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import asyncpg
import psutil

from benchmarks.quote import LLAMA_3_8B, WORK
from broker.blobs import ObstoreBlobs
from broker.controllers.base.context import ControllerContext, Intervals
from broker.controllers.fleet import Fleet
from broker.domain.ids import Installation, attempt_id, instance_name, job_id
from broker.domain.instance import Caps, InstanceState, Observed
from broker.domain.job import Attempt, AttemptState, Handle, Job, JobState
from broker.domain.offer import Offer
from broker.domain.spec import JobSpec
from broker.ports import Change, Lane
from broker.quote.engine import quote
from broker.runtime.clock import SystemClock
from broker.runtime.secret_box import SecretBox
from broker.store.embedded.server import EmbeddedPostgres
from broker.store.migrate import migrate
from broker.store.postgres.store import PostgresStore
from providers.simulated.config import SimulatedConfig
from providers.simulated.provider import SimulatedProvider
from providers.simulated.virtual_backend import VirtualBackend
from trainer.contract import object_keys
from trainer.contract.documents import CheckpointRef, Heartbeat

INSTALLATION = Installation("bnch")
BATCH = 200
BEAT_S = 10.0
QUANTUM_S = 60
CAPS = Caps(spot=True, teardown_s=30, list_lag_s=10, boot_s=60, billing_quantum_s=QUANTUM_S)


class ListedCloud(SimulatedProvider):
    """Cloud whose machines all run; a listing costs no call."""

    machines: Sequence[Observed] = ()

    @property
    def caps(self) -> Caps:
        return CAPS

    async def list(self) -> Sequence[Observed]:
        return self.machines


def _offers(now: datetime) -> tuple[Offer, ...]:
    """Return a small market: each GPU on demand, and on spot in 20 regions at a price that pays for no move."""
    like = Offer(
        id="", provider="simulated", cloud="simulated", region="", instance_type="1xh100", accelerator="h100-sxm",
        gpus=1, gpu_memory_bytes=80 << 30, vcpus=16, ram_bytes=128 << 30, disk_bytes=10**12, spot=False,
        usd_per_hour=Decimal("2.50"), on_demand_usd_per_hour=Decimal("2.50"), billing_quantum_s=QUANTUM_S, seen_at=now,
    )  # fmt: skip
    return tuple(
        replace(
            like, id=f"simulated/{region}/{gpu}/{'spot' if spot else 'od'}", region=f"region-{region}", accelerator=gpu,
            gpu_memory_bytes=memory << 30, spot=spot, usd_per_hour=Decimal("2.40") if spot else Decimal("2.50"),
        )
        for region in range(20)
        for gpu, memory in (("h100-sxm", 80), ("a100-80gb-sxm", 80), ("l40s", 48))
        for spot in (False, True)
    )  # fmt: skip


def _job(number: int, now: datetime) -> Job:
    spec = JobSpec.model_validate(
        {
            "name": f"active-{number}", "cap_usd": "4000",
            "train": {"model": LLAMA_3_8B.name, "data": {"path": "rows.csv", "completion": "{text}"}},
            "deadline": (now + timedelta(hours=300, seconds=number)).isoformat(),
        }
    )  # fmt: skip
    workload = replace(WORK, steps=100_000 + number)
    return Job(
        id=job_id(os.urandom(9)), owner=f"user-{number % 50}", spec=spec, workload=workload, created_at=now,
        cap_usd=spec.cap_usd,
    )  # fmt: skip


async def _fill(store: PostgresStore, count: int, offers: Sequence[Offer], blobs: ObstoreBlobs) -> list[Observed]:
    """Write the jobs with one training attempt each, an hour old; return their machines."""
    machines: list[Observed] = []
    while len(machines) < count:
        now = datetime.now(UTC)
        batch = [_job(len(machines) + n, now) for n in range(min(BATCH, count - len(machines)))]
        await asyncio.gather(*(store.submit(job, key=None, body_sha256="", events=()) for job in batch))
        jobs = await store.claim_jobs([JobState.QUEUED], owner="fill", lease_s=60, limit=BATCH)
        admits = [
            Change(job=(job, replace(job, state=JobState.ACTIVE, attempts=1)), admit=_attempt(job, offers, now))
            for job in jobs
        ]
        assert all(await store.apply(admits))
        leased = await store.claim_attempts(Lane.LAUNCH, owner="fill", lease_s=60, limit=BATCH)
        began = now - timedelta(hours=1)
        running = [
            replace(
                row.attempt, state=AttemptState.TRAINING, create_sent_at=began, running_at=began, booted_at=began,
                first_beat_at=began, handles=(_handle(row.attempt),), beat=_beat(row.attempt.id, 1),
            )
            for row in leased
        ]  # fmt: skip
        assert all(
            await store.apply([Change(attempt=(row.attempt, to)) for row, to in zip(leased, running, strict=True)])
        )
        machines += [
            Observed(
                handle=attempt.handles[0], state=InstanceState.RUNNING, accelerator="h100-sxm", gpus=1,
                usd_per_hour=Decimal("2.50"), created_at=began,
            )
            for attempt in running
        ]  # fmt: skip
        await asyncio.gather(
            *(
                blobs.put(object_keys.heartbeat(attempt.id, 0), _beat(attempt.id, 1).model_dump_json().encode())
                for attempt in running
            )
        )
    return machines


def _attempt(job: Job, offers: Sequence[Offer], now: datetime) -> Attempt:
    new = attempt_id(job.id, 1)
    line = quote(
        job.spec, job.workload, offers[:1], now=now, local_files=False, scoped_store=True, spent=Decimal(0),
        cap_left=job.cap_usd, excluded={}, caps={"simulated": CAPS},
    ).lines[0]  # fmt: skip
    return Attempt(
        id=new, job_id=job.id, number=1, name=instance_name(INSTALLATION, new), line=line, created_at=now,
        reserved_usd=job.cap_usd,
    )  # fmt: skip


def _handle(attempt: Attempt) -> Handle:
    return Handle(provider="simulated", id=attempt.name, name=attempt.name, region=attempt.line.offer.region)


def _beat(attempt: str, seq: int) -> Heartbeat:
    saved = CheckpointRef(manifest="m", step=10 * seq, save_s=10, stall_s=1, bytes=10**9)
    return Heartbeat(
        attempt=attempt, boot="boot", seq=seq, phase="training", step=1000 + seq, total_steps=100_000,
        checkpoint=saved, gpu_utilisation=0.9,
    )  # fmt: skip


def beat(folder: Path) -> None:
    """Write every heartbeat each `BEAT_S` seconds, in even steps, until stdin is closed."""
    paths = sorted(path for path in folder.rglob("0") if path.is_file())
    attempts = [path.parent.name for path in paths]
    seq, began = 1, time.monotonic()
    while True:
        seq += 1
        for number, (path, attempt) in enumerate(zip(paths, attempts, strict=True)):
            path.write_text(_beat(attempt, seq).model_dump_json())
            if number % 100 == 0:
                time.sleep(max(0.0, began + BEAT_S * ((seq - 2) + number / len(paths)) - time.monotonic()))


class _Watch:
    """Times of reviews and charges, from the store's own rows."""

    def __init__(self, connection: "asyncpg.Connection[asyncpg.Record]", intervals: Intervals) -> None:
        self._connection, self._intervals = connection, intervals
        self.late = 0
        self.longest = {"review_s": 0.0, "charge_s": 0.0}

    async def look(self) -> None:
        """Count attempts whose latest review or charge is older than the rhythm and one round of slack."""
        (row,) = await self._connection.fetch(
            "SELECT max(extract(epoch FROM clock_timestamp() - reviewed_at))::float8 AS review_s, "
            "max(extract(epoch FROM clock_timestamp() - charged_to))::float8 AS charge_s, "
            "count(*) FILTER (WHERE reviewed_at < clock_timestamp() - $1 * interval '1 second' "
            "OR charged_to < clock_timestamp() - $2 * interval '1 second') AS late FROM attempts",
            self._intervals.review_s,
            QUANTUM_S + self._intervals.billing_s,
        )
        self.late = max(self.late, row["late"])
        self.longest = {name: max(seconds, row[name]) for name, seconds in self.longest.items()}


async def measure(attempts: int, seconds: float, warm_s: float) -> dict[str, object]:
    """Run one broker for `warm_s` seconds, then measure it for `seconds`."""
    with tempfile.TemporaryDirectory(prefix="gb-", dir="/dev/shm") as name:  # heartbeats do not wait for the disk
        folder, clock, intervals = Path(name), SystemClock(), Intervals()
        blobs = ObstoreBlobs.open((folder / "blobs").as_uri(), INSTALLATION)
        async with await EmbeddedPostgres.start(folder / "pg") as server:
            await migrate(server.dsn)
            store = await PostgresStore.connect(server.dsn)
            config = SimulatedConfig.model_validate({"body": "virtual"})
            body = VirtualBackend(blobs, clock, config.virtual, seed=1)
            cloud = ListedCloud(config, body, installation=INSTALLATION, state=folder, clock=clock)
            offers = _offers(clock.now())
            cloud.machines = await _fill(store, attempts, offers, blobs)
            beats = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "benchmarks.active",
                "--beat",
                str(folder / "blobs"),
                stdin=asyncio.subprocess.PIPE,
            )
            context = ControllerContext(
                installation=INSTALLATION, owner="active", store=store, blobs=blobs, providers={"simulated": cloud},
                clock=clock, intervals=intervals,
            )  # fmt: skip
            fleet = Fleet.build(context, SecretBox(bytes(32)), lambda: offers, ())
            work = asyncio.create_task(fleet.run())
            connection = await asyncpg.connect(server.dsn)
            watch, me = _Watch(connection, intervals), psutil.Process()
            await asyncio.sleep(warm_s)
            begun, cpu = time.perf_counter(), sum(me.cpu_times()[:2])
            while time.perf_counter() - begun < seconds and not work.done():
                await asyncio.sleep(5)
                await watch.look()
            wall, used = time.perf_counter() - begun, sum(me.cpu_times()[:2]) - cpu
            rss = me.memory_info().rss
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            beats.kill()
            await beats.wait()
            await connection.close()
            await store.close()
    return {
        "attempts": attempts, "rss_mb": round(rss / 1024**2, 1), "cpu_share": round(used / wall, 3), "late": watch.late,
        "seconds": round(wall, 1), **{key: round(value, 1) for key, value in watch.longest.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=240.0, help="time measured; reviews have a rhythm of 180 s")
    parser.add_argument("--warm-s", type=float, default=240.0, help="time before, in which each attempt has a review")
    parser.add_argument("--beat", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.beat:
        beat(given.beat)
    else:
        print(json.dumps(asyncio.run(measure(given.attempts, given.seconds, given.warm_s))))


if __name__ == "__main__":
    main()
