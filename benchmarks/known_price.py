"""Compare `gpubroker quote` with a published price: Mistral-7B, QLoRA, 1,500 samples, 10 minutes, $0.45.

The published run used one L40S at $2.75 an hour. The source does not state the samples' length, so several lengths are
quoted; other settings that the source does not state have their defaults. The API runs on a socket, with an emulated S3
and one offer in its market. The command line is a separate process. Prints the quote as a user sees it, a line for each
length, and one JSON line.
"""

import asyncio
import json
import logging
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
from moto.server import ThreadedMotoServer

from broker.api.service.interfaces import Settings
from broker.blobs import ObstoreBlobs
from broker.domain.ids import Installation
from broker.domain.instance import Caps
from broker.domain.money import usd
from broker.domain.offer import Offer
from broker.estimator.speed.hardware import TABLE
from broker.preflight.dataset import BYTES_PER_TOKEN
from broker.runtime.clock import SystemClock
from providers.runpod.provider import CAPS
from tests.api.harness import FixedMarket, serving
from tests.support.memory_store.store import MemoryStore

MINUTES, USD, USD_PER_HOUR = 10.0, 0.45, "2.75"
SAMPLES = 1500
TOKENS = 512
"""Assumed tokens of a row: the default of `train.max_length`, which every row fills."""
LENGTHS = (128, 256, 384, 512, 640, 768)
SPEC = """\
name: known-price
cap_usd: 5
train:
  model: mistralai/Mistral-7B-v0.1
  method: {kind: qlora}
  max_length: %d
  data: {path: rows.jsonl, completion: "{text}"}
"""
L40S = Offer(
    id="l40s", provider="runpod", cloud="RunPod", region="eu", instance_type="1xL40S", accelerator="l40s", gpus=1,
    gpu_memory_bytes=TABLE["l40s"].memory_bytes, vcpus=16, ram_bytes=2**36, disk_bytes=10**12, spot=False,
    usd_per_hour=usd(Decimal(USD_PER_HOUR)), seen_at=datetime(2026, 1, 1, tzinfo=UTC),
)  # fmt: skip


@dataclass
class OneMachine(FixedMarket):
    """RunPod with one L40S only, and with the boot and teardown times of its provider."""

    items: Sequence[Offer] = field(default_factory=lambda: [L40S])

    def caps(self) -> dict[str, Caps]:
        return {"runpod": CAPS}


@dataclass(frozen=True, kw_only=True)
class QuotedFigures:
    """(P50, P90) of minutes and dollars of the quote's only line, set-up included."""

    minutes: tuple[float, float]
    usd: tuple[float, float]
    document: dict[str, Any]

    @property
    def contains(self) -> bool:
        """Return True if the interval that the quote prints contains the published figures."""
        spans = ((self.minutes, MINUTES), (self.usd, USD))
        return all(p50 <= published <= p90 for (p50, p90), published in spans)


@asynccontextmanager
async def application_environment(folder: Path) -> AsyncIterator[dict[str, str]]:
    """Yield the environment of a command line that reaches the application."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # otherwise it logs a line for each request
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    store = MemoryStore(SystemClock())
    try:
        host, port = moto.get_host_and_port()
        options = {"aws_endpoint": f"http://{host}:{port}", "aws_access_key_id": "a", "aws_secret_access_key": "b"}
        async with aiohttp.ClientSession() as client, client.put(f"{options['aws_endpoint']}/bucket") as answer:
            answer.raise_for_status()
        options["aws_region"] = "us-east-1"
        blobs = ObstoreBlobs.open("s3://bucket", Installation("known"), options=options)
        async with serving(store, blobs, settings=Settings(spool=folder / "spool")) as api:
            api.service.quotes.market = OneMachine()
            token = (await api.token("benchmark"))["Authorization"].removeprefix("Bearer ")
            own = {"GPUBROKER_URL": api.url, "GPUBROKER_TOKEN": token, "GPUBROKER_HOME": str(folder / "home")}
            yield {**os.environ, **own}
    finally:
        await store.close()
        moto.stop()


def spec(folder: Path, tokens: int) -> Path:
    """Write a spec and its data: rows that the check counts as `tokens` tokens each. Return the spec's path."""
    size = round(tokens * BYTES_PER_TOKEN)
    rows = (json.dumps({"text": (f"sample {number}: " + "word " * size)[:size]}) for number in range(SAMPLES))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    path = folder / f"known-{tokens}.yaml"
    path.write_text(SPEC % tokens)
    return path


async def quote_output(environment: dict[str, str], *words: str) -> str:
    """Return the output of `gpubroker quote`."""
    command = (sys.executable, "-m", "broker.cli", "quote", *words)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    if process.returncode:
        raise SystemExit(f"gpubroker quote ended with {process.returncode}: {err.decode()}")
    return out.decode()


async def quoted(environment: dict[str, str], folder: Path, tokens: int = TOKENS) -> QuotedFigures:
    """Quote the job with rows of `tokens` tokens."""
    document = json.loads(await quote_output(environment, str(spec(folder, tokens)), "--json"))
    (line,) = document["lines"]
    if line["verdict"] != "kept":
        raise SystemExit(f"the L40S was dropped: {line['reason']}")
    return QuotedFigures(
        minutes=(60 * line["hours_p50"], 60 * line["hours_p90"]),
        usd=(float(line["usd_p50"]), float(line["usd_p90"])),
        document=document,
    )


async def show(folder: Path) -> None:
    """Print the quote, a line for each length of rows, and the figures as JSON."""
    async with application_environment(folder) as environment:
        print(await quote_output(environment, str(spec(folder, TOKENS)), "--explain"))
        for tokens in LENGTHS:
            figures = await quoted(environment, folder, tokens)
            (m50, m90), (u50, u90) = figures.minutes, figures.usd
            inside = "contains" if figures.contains else "does not contain"
            span = f"{m50:5.1f} – {m90:4.1f} min, ${u50:.2f} – ${u90:.2f}"
            print(f"{tokens:5} tokens a row: {span}; {inside} {MINUTES:g} min, ${USD}")
        figures = await quoted(environment, folder)
        print(
            json.dumps({"tokens": TOKENS, "minutes": figures.minutes, "usd": figures.usd, "contains": figures.contains})
        )


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(show(Path(name)))


if __name__ == "__main__":
    main()
