"""Submit to durable 202: `python -m benchmarks.submit --clients 50`, or `--clients 1,50,200`. The last line is JSON.

Embedded PostgreSQL with its durable settings, the API in a process of its own (uvloop), the clients in another: closed
loops, each with one connection, that send the next job as soon as the last one was answered. Every request is a new
job under a new idempotency key, with the data set of the example uploaded before.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import uvloop

from broker.api.service import Settings
from broker.app import calm_garbage_collector
from broker.blobs import ObstoreBlobs
from broker.domain.ids import Installation
from broker.store.embedded import EmbeddedPostgres
from broker.store.migrate import migrate
from broker.store.postgres import PostgresStore
from tests.api.harness import serving, spec

DATA = Path(__file__).parents[1] / "examples" / "devils-dictionary.csv"
WARM_UP = 200


async def serve(dsn: str, folder: Path) -> None:
    """Prints where the API is and a request's parts as one line of JSON, then serves until stdin closes."""
    store = await PostgresStore.connect(dsn)
    blobs = ObstoreBlobs.open(folder.as_uri(), Installation("benc"))
    async with serving(store, blobs, settings=Settings()) as api:
        me = await api.token("benchmark")
        upload = await api.upload(me, DATA.read_bytes(), DATA.name)
        body = spec(upload["ref"])
        calm_garbage_collector()
        print(json.dumps({"url": api.url, "authorization": me["Authorization"], "body": body}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    await store.close()


async def drive(target: dict[str, Any], clients: int, requests: int) -> None:
    """Prints the latencies in seconds and the time of the whole as one line of JSON."""
    address = urlsplit(target["url"])
    body = json.dumps(target["body"]).encode()
    run = os.urandom(6).hex()
    common = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: {target['authorization']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    left = iter(range(requests))

    async def client() -> list[float]:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        taken = []
        for number in left:
            head = f"{common}Idempotency-Key: {run}-{number}\r\n\r\n"
            started = perf_counter()
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            text = await reader.readexactly(length)
            taken.append(perf_counter() - started)
            if not answer.startswith(b"HTTP/1.1 202"):
                raise SystemExit(f"refused: {answer.decode()}{text.decode()}")
        writer.close()
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


async def measure(target: str, clients: int, requests: int) -> dict[str, Any]:
    driver = await child("--drive", target, "--clients", str(clients), "--requests", str(requests))
    output, _ = await driver.communicate()
    if driver.returncode:
        raise SystemExit(driver.returncode)
    result = json.loads(output)
    cuts = statistics.quantiles(result["latencies"], n=100, method="inclusive")
    return {
        "clients": clients,
        "requests": requests,
        "p50_ms": round(cuts[49] * 1000, 2),
        "p99_ms": round(cuts[98] * 1000, 2),
        "requests_per_s": round(requests / result["wall"], 1),
    }


async def benchmark(clients: list[int], requests: int) -> None:
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
            await measure(target, 8, WARM_UP)
            runs = []
            for count in clients:
                runs.append(await measure(target, count, requests))
                print(
                    "{clients:4} clients: p50 {p50_ms} ms, p99 {p99_ms} ms, {requests_per_s} jobs/s".format(**runs[-1])
                )
            api.stdin.close()
            await api.wait()
    print(json.dumps(runs[0] if len(runs) == 1 else {"runs": runs}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", default="50", help="a number, or several with commas")
    parser.add_argument("--requests", type=int, default=4000, help="jobs for each number of clients")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    given = parser.parse_args()
    clients = [int(n) for n in given.clients.split(",")]
    if given.serve:
        uvloop.run(serve(given.serve, given.folder))
    elif given.drive:
        uvloop.run(drive(json.loads(given.drive), clients[0], given.requests))
    else:
        asyncio.run(benchmark(clients, given.requests))


if __name__ == "__main__":
    main()
