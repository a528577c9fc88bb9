"""Many reservations at once on one budget: `python -m benchmarks.budget_race --reservations 10000`.

Brokers are processes of their own, each with its connections, on one real PostgreSQL that commits durably. Each claims
queued jobs as placement does and asks to admit them, many or one a transaction, until none is left. The budget suffices
for about half. The reserved amount is read from the database, afterwards and during the race. Prints one JSON line.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import asyncpg

from broker.domain.ids import Installation, attempt_id, instance_name, job_id
from broker.domain.job import Attempt, Job, JobState
from broker.domain.money import ZERO, LedgerEntry, LedgerKind
from broker.domain.offer import Offer, OfferVerdict, QuoteLine
from broker.domain.policy import Budget, BudgetPeriod, Policy, Window
from broker.domain.spec import JobSpec
from broker.domain.tenancy import DEFAULT_TEAM
from broker.domain.workload import Workload
from broker.ports import Change
from broker.store.embedded.server import EmbeddedPostgres
from broker.store.migrate import migrate
from broker.store.postgres.store import PostgresStore

USD = Decimal("0.01")
MOST = 1000
"""A reservation has 1 to so many cents."""
LIMIT_SHARE = Decimal("0.5")
"""Budget's limit as a share of all requested reservations."""
LEASE_S = 600.0
CLAIM = 200
"""Jobs of one claim, as placement takes them."""
COMMITTED = """
SELECT (SELECT COALESCE(sum(usd), 0) FROM usage)
    + (SELECT COALESCE(sum(GREATEST(reserved_usd - charged_usd, 0)), 0) FROM attempts WHERE state <> 'ended')
"""
HELD = "SELECT count(*) FROM attempts"


OFFER = Offer(
    id="race", provider="race", cloud="race", region="r", instance_type="l40s", accelerator="l40s", gpus=1,
    gpu_memory_bytes=48 << 30, vcpus=8, ram_bytes=64 << 30, disk_bytes=100 << 30, spot=False,
    usd_per_hour=Decimal(1), seen_at=datetime(2026, 1, 1, tzinfo=UTC),
)  # fmt: skip
LINE = QuoteLine(offer=OFFER, verdict=OfferVerdict.KEPT, reason="race")


def job(number: int, usd: Decimal) -> Job:
    """Return a job that reserves `usd`."""
    script = {"code": "upload:" + "0" * 64, "command": ["true"]}
    spec = JobSpec.model_validate({"name": f"race-{number}", "cap_usd": str(usd), "script": script})
    return Job(
        id=job_id(os.urandom(9)),
        owner=f"user{number % 16}",
        spec=spec,
        workload=Workload(shape=None, method="script"),
        created_at=OFFER.seen_at,
        cap_usd=usd,
    )


def admission(claimed: Job) -> Change:
    """Return the admission of a job as placement makes it."""
    new = attempt_id(claimed.id, 1)
    attempt = Attempt(
        id=new, job_id=claimed.id, number=1, name=instance_name(Installation("race"), new), line=LINE,
        created_at=OFFER.seen_at, reserved_usd=claimed.cap_usd,
    )  # fmt: skip
    ledger_entry = LedgerEntry(job_id=claimed.id, attempt_id=new, kind=LedgerKind.RESERVATION, usd=claimed.cap_usd)
    return Change(
        job=(claimed, replace(claimed, state=JobState.ACTIVE, attempts=1)), admit=attempt, ledger=(ledger_entry,)
    )


async def race(dsn: str, own: str, connections: int, batch: int) -> None:
    """Run one broker: it prints when it is ready, and starts to race when it reads a line."""
    store = await PostgresStore.connect(dsn, pool_size=connections)
    await asyncio.gather(*(store.ping() for _ in range(connections)))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)

    async def work() -> int:
        asked = 0
        while jobs := await store.claim_jobs([JobState.QUEUED], owner=own, lease_s=LEASE_S, limit=CLAIM):
            for start in range(0, len(jobs), batch):
                await store.apply([admission(job) for job in jobs[start : start + batch]])
            asked += len(jobs)
        return asked

    print(sum(await asyncio.gather(*(work() for _ in range(connections)))), flush=True)
    await store.close()


async def watch(dsn: str, done: asyncio.Event) -> Decimal:
    """Return the most that was committed at any look."""
    connection, most = await asyncpg.connect(dsn), ZERO
    while not done.is_set():
        most = max(most, await connection.fetchval(COMMITTED))
        await asyncio.sleep(0.2)
    await connection.close()
    return most


async def child(*words: str) -> asyncio.subprocess.Process:
    pipe, program = asyncio.subprocess.PIPE, (sys.executable, "-m", "benchmarks.budget_race")
    return await asyncio.create_subprocess_exec(*program, *words, stdin=pipe, stdout=pipe)


async def told(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode().strip()
    if not line:
        raise SystemExit("a broker of the race ended early")
    return line


async def fill(store: PostgresStore, reservations: int) -> Decimal:
    """Queue jobs under one budget, and return the budget's limit."""
    chance = random.Random(1)
    jobs = [job(number, USD * chance.randint(1, MOST)) for number in range(reservations)]
    for start in range(0, reservations, 500):
        await asyncio.gather(
            *(store.submit(one, key=None, body_sha256="", events=()) for one in jobs[start : start + 500])
        )
    limit = (sum((one.cap_usd for one in jobs), ZERO) * LIMIT_SHARE).quantize(USD)
    budget = Budget(limit_usd=limit, per=BudgetPeriod.MONTH, window=Window.ROLLING)
    await store.put_policy(Policy(name="race", team=DEFAULT_TEAM, budgets=(budget,)))
    return limit


async def measure(dsn: str, given: argparse.Namespace) -> dict[str, Any]:
    store = await PostgresStore.connect(dsn)
    limit = await fill(store, given.reservations)
    words = "--connections", str(given.connections), "--batch", str(given.batch), "--race", dsn
    brokers = [await child(*words, "--own", f"b{n}") for n in range(given.brokers)]
    for broker in brokers:
        await told(broker)
    done = asyncio.Event()
    watching = asyncio.create_task(watch(dsn, done))
    begun = time.perf_counter()
    for broker in brokers:
        assert broker.stdin is not None
        broker.stdin.write(b"go\n")
    asked = sum([int(await told(broker)) for broker in brokers])
    wall = time.perf_counter() - begun
    done.set()
    seen = await watching
    for broker in brokers:
        await broker.wait()
    connection = await asyncpg.connect(dsn)
    reserved, held = await connection.fetchval(COMMITTED), await connection.fetchval(HELD)
    await connection.close()
    await store.close()
    return {
        "reserved_usd": str(reserved),
        "limit_usd": str(limit),
        "reservations_per_s": round(asked / wall, 1),
        "reservations": asked,
        "admitted": held,
        "most_seen_usd": str(max(seen, reserved)),
        "seconds": round(wall, 2),
        "brokers": given.brokers,
        "connections": given.brokers * given.connections,
        "batch": given.batch,
    }


async def benchmark(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="gb-") as name:
        async with await EmbeddedPostgres.start(Path(name) / "state", durable=True) as server:
            await migrate(server.dsn)
            found = await measure(server.dsn, given)
    print(json.dumps(found))
    if Decimal(found["most_seen_usd"]) > Decimal(found["limit_usd"]):
        raise SystemExit("the limit was passed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reservations", type=int, default=10_000)
    parser.add_argument("--brokers", type=int, default=4, help="processes")
    parser.add_argument("--connections", type=int, default=8, help="of each broker, all asking at once")
    parser.add_argument(
        "--batch", type=int, default=CLAIM, help="reservations of one transaction; placement has up to 200"
    )
    parser.add_argument("--race", help=argparse.SUPPRESS)
    parser.add_argument("--own", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.race:
        asyncio.run(race(given.race, given.own, given.connections, given.batch))
    else:
        asyncio.run(benchmark(given))


if __name__ == "__main__":
    main()
