"""Cost of learning the prices of all four clouds: `python -m benchmarks.offers --offers 5000`.

One poll of the market as the daemon makes it, with every cloud's real native half. The emulated clouds run in another
process, so only our own CPU time counts. The clock advances by the daemon's 30 s between two polls, so that cached
answers expire as often as in a daemon. The last line is JSON.
"""

import argparse
import asyncio
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from broker.controllers.market.poller import MarketIntervals, MarketPoller
from broker.daemon.config import IntervalsConfig
from broker.domain.ids import Installation
from broker.ports import Provider
from broker.runtime.clock import SystemClock
from providers.aws.market import FAMILIES, KNOWN_GPUS
from providers.aws.provider import REGIONS
from providers.common.account_guard import Account
from providers.common.cloud import CloudProvider
from providers.common.gpu_names import accelerator
from providers.registry import CLOUD_CLASSES, ProvidersConfig
from providers.skypilot.config import SkyConfig
from providers.skypilot.launcher import SkyLauncher

INSTALLATION = Installation("bnch")
MIB = 1024**2
KEYS = {
    "RUNPOD_API_KEY": "test-key", "VAST_API_KEY": "test-key", "LAMBDA_API_KEY": "test-key",
    "AWS_ACCESS_KEY_ID": "AKIAEMULATED", "AWS_SECRET_ACCESS_KEY": "test-key", "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip
QUOTAS = {"Running On-Demand G and VT instances": 768.0, "Running On-Demand P instances": 768.0}


class HastyClock(SystemClock):
    """Clock that skips the time between two polls."""

    skipped_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.skipped_s


async def serve(count: int) -> None:
    """Start emulated clouds with `count` offers at Vast, print their addresses as JSON, serve until stdin closes."""
    from tests.clouds.aws import Aws
    from tests.clouds.emulator import Clouds
    from tests.clouds.vast_market import many_offers

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    async with Clouds() as clouds, Aws(clouds.world, regions=REGIONS) as aws:
        clouds.vast.offers = {row.id: row for row in many_offers(count)}
        clouds.vast.search_cap = None  # the whole market in one answer: more to read than cut-off ones
        await asyncio.to_thread(_price, aws)
        print(json.dumps({"clouds": clouds.url, "aws": aws.url}), flush=True)
        await asyncio.to_thread(sys.stdin.read)


def _price(aws: Any) -> None:
    """A price for every instance type that the broker would buy, in every zone of every region."""
    aws.front.quotas.update(QUOTAS)
    for region in REGIONS:
        ec2 = aws.client(region)
        zones = [one["ZoneName"] for one in ec2.describe_availability_zones()["AvailabilityZones"]]
        pages = ec2.get_paginator("describe_instance_types").paginate(
            Filters=[{"Name": "instance-type", "Values": list(FAMILIES)}]
        )
        for kind in (one for page in pages for one in page["InstanceTypes"]):
            gpus = kind.get("GpuInfo", {}).get("Gpus")
            if gpus and accelerator(gpus[0]["Name"], gpus[0]["MemoryInfo"]["SizeInMiB"] * MIB) in KNOWN_GPUS:
                hour = kind["VCpuInfo"]["DefaultVCpus"] / 4
                aws.front.on_demand[kind["InstanceType"], region] = str(hour)
                aws.front.spot.update({(kind["InstanceType"], zone): str(hour / 2) for zone in zones})
        aws.front.disk[region] = "0.08"


@asynccontextmanager
async def elsewhere(count: int) -> AsyncIterator[dict[str, str]]:
    """Run `serve` in a process of its own, and yield the addresses of its clouds."""
    emulator = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.offers", "--serve", "--offers", str(count),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert emulator.stdin is not None
    assert emulator.stdout is not None
    try:
        told = await emulator.stdout.readline()
        if not told:
            raise RuntimeError("the emulated clouds do not start")
        yield json.loads(told)
    finally:
        emulator.stdin.close()
        await emulator.wait()


def providers(at: dict[str, str], clock: HastyClock, home: Path) -> dict[str, Provider]:
    """Return the providers as the registry makes them, with keys that are not this user's; nothing is ever launched."""
    launcher = SkyLauncher(SkyConfig(url="http://127.0.0.1:9"), installation=INSTALLATION, state=home / "sky")
    sections = {
        name: {"endpoint": at["aws" if name == "aws" else "clouds"], "emulated": True} for name in CLOUD_CLASSES
    }
    found: dict[str, Provider] = {}
    for name, section in ProvidersConfig.model_validate(sections).rented().items():
        cloud = CLOUD_CLASSES[name][0](section, installation=INSTALLATION, clock=clock, env=KEYS, home=home)
        account = Account(cloud, home / name / "account.json")
        found[name] = CloudProvider(cloud, launcher, account, installation=INSTALLATION, emulated=True)
    return found


async def measure(offers: int, polls: int) -> dict[str, Any]:
    """Return CPU and wall seconds of a poll: the first, and the median and the worst of those that follow."""
    clock, every_s = HastyClock(), IntervalsConfig().market_s
    async with elsewhere(offers) as at:
        with tempfile.TemporaryDirectory(prefix="gb-") as home:
            made = providers(at, clock, Path(home))
            market = MarketPoller(made, clock, MarketIntervals(poll_s=every_s))
            runs = []
            for _ in range(polls + 1):
                cpu, wall = time.process_time(), time.perf_counter()
                await market.step()
                runs.append((time.process_time() - cpu, time.perf_counter() - wall))
                clock.skipped_s += every_s
            status = market.status()
            for provider in made.values():
                await provider.close()
    if wrong := [f"{one.name}: {one.error}" for one in status if one.error or not one.offers]:
        raise RuntimeError(f"not all clouds sold something: {'; '.join(wrong)}")
    return _figures(runs, {one.name: one.offers for one in status}, offers)


def _figures(runs: list[tuple[float, float]], sold: dict[str, int], offers: int) -> dict[str, Any]:
    cpus, walls = zip(*runs[1:], strict=True)
    figures = {
        "vast_rows": offers,
        "offers": sold,
        "polls": len(cpus),
        "cpu_s": round(statistics.median(cpus), 3),
        "cpu_s_worst": round(max(cpus), 3),
        "cpu_s_first": round(runs[0][0], 3),
        "wall_s": round(statistics.median(walls), 3),
    }
    for name, count in sold.items():
        print(f"  {name:8} {count:7,} offers", flush=True)
    print(
        "  a poll takes {cpu_s} s of CPU (median of {polls}, worst {cpu_s_worst} s; the first {cpu_s_first} s), "
        "{wall_s} s in all".format(**figures),
        flush=True,
    )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--offers", type=int, default=5000, help="asks of the emulated Vast")
    parser.add_argument("--polls", type=int, default=10)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve(given.offers))
    else:
        print(json.dumps(asyncio.run(measure(given.offers, given.polls))))


if __name__ == "__main__":
    main()
