"""Submit to durable: `python -m benchmarks.submit --clients 50 --transport grpc`, or `--clients 1,50,200`.

The last line is JSON.

Embedded PostgreSQL runs with its durable settings, the API in a process of its own, the clients in another. Clients are
closed loops, each with one connection, that send the next job as soon as the last one was answered. Every request is a
new job under a new idempotency key, with the data set of the example uploaded before.

`http` writes to sockets with no library, so that it takes nearly nothing from the server's cores; `aiohttp` and `grpc`
use what a Python program would.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import grpc

from broker.api.grpc.server import serving as serving_grpc
from broker.api.proto.gpubroker.v1 import job_service_pb2_grpc
from broker.api.proto.gpubroker.v1.job_service_pb2 import SubmitJobRequest
from broker.api.proto.gpubroker.v1.spec_pb2 import JobSpec
from broker.api.service.interfaces import Settings
from broker.blobs import ObstoreBlobs
from broker.daemon.app import calm_garbage_collector
from broker.domain.ids import Installation
from broker.store.embedded.server import EmbeddedPostgres
from broker.store.migrate import migrate
from broker.store.postgres.store import PostgresStore
from tests.api.harness import serving, spec
from tests.parity.message import write
from tests.parity.servers import parts

DATA = Path(__file__).parents[1] / "examples" / "devils-dictionary.csv"
WARM_UP = 200


async def serve(dsn: str, folder: Path) -> None:
    """Print where the API is and a request's parts as one line of JSON, then serve until stdin closes."""
    store = await PostgresStore.connect(dsn)
    blobs = ObstoreBlobs.open(folder.as_uri(), Installation("benc"))
    async with (
        serving(store, blobs, settings=Settings(spool=folder.parent / "spool")) as api,
        serving_grpc(parts(api), "127.0.0.1", 0) as port,
    ):
        me = await api.token("benchmark")
        upload = await api.upload(me, DATA.read_bytes(), DATA.name)
        body = spec(upload["ref"])
        calm_garbage_collector()
        at = {"url": api.url, "grpc": f"127.0.0.1:{port}", "authorization": me["Authorization"]}
        print(json.dumps({**at, "body": body}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    await store.close()


Send = Callable[[str], Awaitable[None]]
"""Submits under an idempotency key, and returns when the job is durable."""


@asynccontextmanager
async def by_http(target: dict[str, Any]) -> AsyncIterator[Send]:
    address = urlsplit(target["url"])
    body = json.dumps(target["body"]).encode()
    common = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: {target['authorization']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    reader, writer = await asyncio.open_connection(address.hostname, address.port)

    async def send(key: str) -> None:
        writer.write(f"{common}Idempotency-Key: {key}\r\n\r\n".encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        text = await reader.readexactly(length)
        if not answer.startswith(b"HTTP/1.1 202"):
            raise SystemExit(f"refused: {answer.decode()}{text.decode()}")

    yield send
    writer.close()


@asynccontextmanager
async def by_aiohttp(target: dict[str, Any]) -> AsyncIterator[Send]:
    headers = {"Authorization": target["authorization"], "Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session:

        async def send(key: str) -> None:
            data, named = json.dumps(target["body"]), {"Idempotency-Key": key}
            async with session.post(f"{target['url']}/v1/jobs", data=data, headers=named) as answer:
                text = await answer.text()
                if answer.status != 202:
                    raise SystemExit(f"refused: {answer.status} {text}")

        yield send


@asynccontextmanager
async def by_grpc(target: dict[str, Any]) -> AsyncIterator[Send]:
    own_connection = (("grpc.use_local_subchannel_pool", 1),)
    metadata = (("authorization", target["authorization"]),)
    async with grpc.aio.insecure_channel(target["grpc"], options=own_connection) as channel:
        stub = job_service_pb2_grpc.JobServiceStub(channel)
        given = write(JobSpec(), target["body"])

        async def send(key: str) -> None:
            await stub.SubmitJob(SubmitJobRequest(spec=given, idempotency_key=key), metadata=metadata)

        yield send


TRANSPORTS = {"http": by_http, "aiohttp": by_aiohttp, "grpc": by_grpc}


async def drive(target: dict[str, Any], transport: str, clients: int, requests: int) -> None:
    """Print the latencies in seconds and the time of the whole as one line of JSON."""
    run = os.urandom(6).hex()
    left = iter(range(requests))

    async def client() -> list[float]:
        taken = []
        async with TRANSPORTS[transport](target) as send:
            for number in left:
                started = perf_counter()
                await send(f"{run}-{number}")
                taken.append(perf_counter() - started)
        return taken

    started = perf_counter()
    latencies = await asyncio.gather(*(client() for _ in range(clients)))
    wall = perf_counter() - started
    print(json.dumps({"latencies": [t for per_client in latencies for t in per_client], "wall": wall}))


async def child(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.submit",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=64 * 1024**2,
    )


async def measure(target: str, transport: str, clients: int, requests: int) -> dict[str, Any]:
    numbers = ("--clients", str(clients), "--requests", str(requests))
    driver = await child("--drive", target, "--transport", transport, *numbers)
    output, _ = await driver.communicate()
    if driver.returncode:
        raise SystemExit(driver.returncode)
    result = json.loads(output)
    return {"transport": transport, "clients": clients, **figures(result["latencies"], result["wall"])}


def figures(latencies: list[float], wall: float) -> dict[str, Any]:
    """Return the figures of latencies in seconds, and of the time that all of them took."""
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return {
        "requests": len(latencies),
        "p50_ms": round(cuts[49] * 1000, 2),
        "p99_ms": round(cuts[98] * 1000, 2),
        "requests_per_s": round(len(latencies) / wall, 1),
    }


async def benchmark(transport: str, clients: list[int], requests: int) -> None:
    with tempfile.TemporaryDirectory(prefix="gb-") as name:
        folder = Path(name)
        async with await EmbeddedPostgres.start(folder / "state", durable=True) as server:
            await migrate(server.dsn)
            api = await child("--serve", server.dsn, "--folder", str(folder / "blobs"))
            assert api.stdin is not None
            assert api.stdout is not None
            target = (await api.stdout.readline()).decode()
            if not target:
                raise SystemExit("the API did not start")
            await measure(target, transport, 8, WARM_UP)
            runs = []
            for count in clients:
                runs.append(await measure(target, transport, count, requests))
                print(
                    "{clients:4} clients: p50 {p50_ms} ms, p99 {p99_ms} ms, {requests_per_s} jobs/s".format(**runs[-1])
                )
            api.stdin.close()
            await api.wait()
    print(json.dumps(runs[0] if len(runs) == 1 else {"runs": runs}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", default="50", help="a number, or several with commas")
    parser.add_argument("--transport", choices=sorted(TRANSPORTS), default="http")
    parser.add_argument("--requests", type=int, default=4000, help="jobs for each number of clients")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    given = parser.parse_args()
    clients = [int(n) for n in given.clients.split(",")]
    if given.serve:
        asyncio.run(serve(given.serve, given.folder))
    elif given.drive:
        asyncio.run(drive(json.loads(given.drive), given.transport, clients[0], given.requests))
    else:
        asyncio.run(benchmark(given.transport, clients, given.requests))


if __name__ == "__main__":
    main()
