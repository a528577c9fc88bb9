"""Speed of one webhook channel: `python -m benchmarks.outbox --events 20000`.

Events of many jobs are written to PostgreSQL, which fans them out. Then the outbox of one broker delivers them to a
receiver on loopback, a separate process: signed posts over kept connections, answered with 204. The receiver counts
events that come twice or out of their job's order. The last line is JSON.
"""

import argparse
import asyncio
import json
import random
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, cast

from broker.blobs import ObstoreBlobs
from broker.controllers.base.context import ControllerContext
from broker.controllers.notifications.outbox import Outbox
from broker.domain.ids import Installation
from broker.domain.job import Event, Job
from broker.domain.notifications import Channel
from broker.notify.webhook.notifier import WebhookNotifier
from broker.ports import Change
from broker.runtime.clock import SystemClock
from broker.runtime.control_loop import run_forever
from broker.runtime.secret_box import SecretBox
from broker.store.embedded.server import EmbeddedPostgres
from broker.store.migrate import migrate
from broker.store.postgres.store import PostgresStore
from tests.conformance.samples import make_job

BATCH = 50
"""Jobs of one transaction."""
INSTALLATION = Installation("bnch")
ANSWER = b"HTTP/1.1 204 No Content\r\n\r\n"


class Receiver(asyncio.Protocol):
    """Receiver that answers each post on a persistent connection, and reads only its id."""

    last: ClassVar[defaultdict[str, int]] = defaultdict(int)
    got = disorder = 0

    def __init__(self) -> None:
        self._held = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._held += data
        while (end := self._held.find(b"\r\n\r\n")) >= 0:
            lines = self._held[:end].split(b"\r\n")[1:]
            headers = dict(line.lower().split(b": ", 1) for line in lines)
            size = end + 4 + int(headers[b"content-length"])
            if len(self._held) < size:
                return
            self._held = self._held[size:]
            self._count(headers[b"webhook-id"].decode())
            assert self._transport is not None
            self._transport.write(ANSWER)

    def _count(self, own: str) -> None:
        _, job, seq = own.split("_")
        Receiver.got += 1
        Receiver.disorder += int(seq) != Receiver.last[job] + 1
        Receiver.last[job] = int(seq)


async def receive() -> None:
    """Print the port, serve until stdin closes, then print the counts."""
    server = await asyncio.get_running_loop().create_server(Receiver, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    print(json.dumps({"got": Receiver.got, "disorder": Receiver.disorder}), flush=True)


@asynccontextmanager
async def receiver() -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.outbox", "--receive", stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield process, int(await process.stdout.readline())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def write(store: PostgresStore, jobs: int, events: int) -> None:
    """Write `events` events, distributed evenly over the jobs."""
    made = [make_job() for _ in range(jobs)]
    await asyncio.gather(*(store.submit(job, key=None, body_sha256="", events=()) for job in made))
    for begin in range(0, events // jobs, 10):
        for first in range(0, jobs, BATCH):
            await store.apply([_said(job, min(10, events // jobs - begin)) for job in made[first : first + BATCH]])


def _said(job: Job, count: int) -> Change:
    return Change(
        events=tuple(
            Event(job_id=job.id, kind="attempt.ended", message="attempt 1 ended: preempted, $0.0048", data={"step": n})
            for n in range(count)
        )
    )


async def _hooked(store: PostgresStore, box: SecretBox, port: int) -> None:
    """Create a webhook as the only channel."""
    for status in await store.channels():
        await store.write_channel(replace(status.channel, enabled=False))
    secrets = {"url": f"http://127.0.0.1:{port}/", "signing": "whsec_" + "a" * 44}
    clock = SystemClock()
    channel = Channel(
        id="bench",
        kind="webhook",
        name="bench",
        team=None,
        sealed=box.seal(json.dumps(secrets)),
        created_at=clock.now(),
    )
    assert await store.add_channel(channel)


async def measure(jobs: int, events: int) -> dict[str, float | bool]:
    """events_per_s from the start of the controller until nothing waits."""
    box, clock = SecretBox(bytes(32)), SystemClock()
    with tempfile.TemporaryDirectory(prefix="gb-") as folder:
        async with await EmbeddedPostgres.start(Path(folder) / "pg") as server, receiver() as (process, port):
            await migrate(server.dsn)
            store = await PostgresStore.connect(server.dsn)
            await _hooked(store, box, port)
            begun = time.perf_counter()
            await write(store, jobs, events)
            wrote_s = time.perf_counter() - begun
            blobs = ObstoreBlobs.open("memory://", INSTALLATION)
            context = ControllerContext(
                installation=INSTALLATION, owner="bench", store=store, blobs=blobs, providers={}, clock=clock
            )
            notifier = WebhookNotifier(box, clock, insecure_hosts=["127.0.0.1"])
            outbox = Outbox(context, [notifier], jitter=random.random)
            begun, cpu = time.perf_counter(), _cpu_s()
            work = asyncio.create_task(run_forever(outbox, clock))
            while (await _waiting(store)) and not work.done():  # noqa: ASYNC110 (the database is looked at)
                await asyncio.sleep(0.1)
            took, used = time.perf_counter() - begun, _cpu_s() - cpu
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await outbox.close()
            await notifier.close()
            await store.close()
            told, _ = await process.communicate(b"")
    counted = json.loads(told)
    return {
        "jobs": jobs,
        "events": counted["got"],
        "events_per_s": round(counted["got"] / took, 1),
        "in_order": counted["disorder"] == 0 and counted["got"] == events // jobs * jobs,
        "written_per_s": round(counted["got"] / wrote_s, 1),
        "broker_cpu_s": round(used, 1),
    }


async def _waiting(store: PostgresStore) -> int:
    return sum(status.waiting for status in await store.channels())


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--events", type=int, default=20_000, help="In all.")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    with asyncio.Runner() as runner:
        if asked.receive:
            runner.run(receive())
            return
        print(json.dumps(runner.run(measure(asked.jobs, asked.events))))


if __name__ == "__main__":
    main()
