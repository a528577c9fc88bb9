"""Quotes through the HTTP API: `python -m benchmarks.quote_api --offers 50000`. The last line is JSON.

The application on a socket, with embedded PostgreSQL; one client in the same process asks for one quote after another,
each of another job. `ms` is the time of the whole request, `cpu_ms` that of the process, client included.
"""

import argparse
import asyncio
import json
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.quote import LLAMA_3_8B, PROVIDERS, market
from broker.daemon.app import calm_garbage_collector
from broker.domain.instance import Caps
from broker.store.embedded.server import EmbeddedPostgres
from broker.store.migrate import migrate
from broker.store.postgres.store import PostgresStore
from tests.api.harness import FixedMarket, Running, memory_blobs, serving, spec


class Clouds(FixedMarket):
    """Clouds whose machines reach this host's blob store, so that no bucket is needed."""

    def caps(self) -> dict[str, Caps]:
        return {name: Caps(spot=True, reaches_local_files=True) for name in PROVIDERS}


Times = tuple[float, float]


async def ask(api: Running, headers: dict[str, str], body: dict[str, Any]) -> Times:
    """Return milliseconds of one quote, by the clock and of CPU."""
    start, cpu = time.perf_counter(), time.process_time()
    async with api.http.post(f"{api.url}/v1/quotes", json=body, headers=headers) as answer:
        found = await answer.json()
        assert answer.status == 200, found
        assert found["kept"], found["drops"]
    return 1000 * (time.perf_counter() - start), 1000 * (time.process_time() - cpu)


async def measure(dsn: str, offers: int, quotes: int) -> list[Times]:
    store = await PostgresStore.connect(dsn)
    try:
        async with serving(store, memory_blobs()) as api:
            api.service.quotes.market = Clouds(items=market(offers, datetime.now(UTC)))
            calm_garbage_collector()
            me = await api.token("benchmark")
            upload = await api.upload(me)
            body = spec(upload["ref"], cap_usd="400", resources={"max_usd_per_hour": "40"})
            body["train"] |= {"model": LLAMA_3_8B.name, "method": {"kind": "lora", "r": 16}}
            found = []
            for number in range(quotes + 5):
                body["train"]["max_steps"] = 1000 + number
                found.append(await ask(api, me, body))
            return found[5:]
    finally:
        await store.close()


async def run(offers: int, quotes: int) -> list[Times]:
    with tempfile.TemporaryDirectory() as folder:
        async with await EmbeddedPostgres.start(Path(folder) / "state", durable=True) as server:
            await migrate(server.dsn)
            return await measure(server.dsn, offers, quotes)


def percentile(values: list[float], share: float) -> float:
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--offers", type=int, default=50_000)
    parser.add_argument("--quotes", type=int, default=200)
    args = parser.parse_args()
    found = asyncio.run(run(args.offers, args.quotes))
    clock, cpu = [one for one, _ in found], [one for _, one in found]
    print(
        json.dumps(
            {
                "offers": args.offers,
                "quotes": args.quotes,
                "ms_p50": percentile(clock, 0.5),
                "ms_p99": percentile(clock, 0.99),
                "cpu_ms_p50": percentile(cpu, 0.5),
                "cpu_ms_p99": percentile(cpu, 0.99),
            }
        )
    )


if __name__ == "__main__":
    main()
