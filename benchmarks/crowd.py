"""Cost of many launches at once: `python -m benchmarks.crowd --launches 1,4,20`. The last line is JSON.

Script jobs run on real machines of the emulated RunPod, all submitted at once. Memory is the highest proportional set
size (PSS) until the last job sends a heartbeat. It covers the daemon, its database and SkyPilot's API server with all
its workers. The machines share this host, so launches a minute are those of a host that also is its own cloud.
"""

import argparse
import asyncio
import io
import json
import os
import tarfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from broker.api.schemas.jobs import JobDetail
from broker.domain.job import RESTING_JOB_STATES
from providers.skypilot.plugin.shared import LAUNCHING
from tests.clouds.scenarios.scene import Scene

MIB = 1024**2
SAMPLE_S = 2.0
TIMEOUT_S = 120.0
"""Seconds to wait in addition to `EACH_S` for each launch."""
EACH_S = 60.0
PARTS = ("daemon", "database", "skypilot")


async def submit_idle(scene: Scene, cloud: str) -> str:
    """Submit a job that does nothing for an hour."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("empty"))
    spec: dict[str, Any] = {
        "name": "idle", "cap_usd": "20", "script": {"command": ["sleep", "3600"]}, "resources": {"providers": [cloud]},
    }  # fmt: skip
    return await scene.submit(spec, buffer.getvalue(), name="code.tar")


async def end(scene: Scene, *jobs: str) -> None:
    """Cancel the job if it still runs, and wait until its machines are gone."""
    async with scene.client() as client:
        for job in jobs:
            if (await client.job(job)).state not in RESTING_JOB_STATES:
                await client.cancel(job)
    await asyncio.gather(*(scene.rest(job, within_s=TIMEOUT_S + EACH_S * len(jobs)) for job in jobs))


def memory(scene: Scene) -> Counter[str]:
    """Return bytes of PSS by part, and how many processes SkyPilot has."""
    found: Counter[str] = Counter()
    for process in _all(scene):
        try:
            part = _part(" ".join(process.cmdline()))
            found[part] += process.memory_full_info().pss
            found["processes"] += part == "skypilot"
        except psutil.Error:
            continue
    return found


def _all(scene: Scene) -> set[psutil.Process]:
    """PostgreSQL's own children write over their arguments and environment, so they are found as children only."""
    found = set(scene.processes())
    for process in tuple(found):
        with suppress(psutil.Error):
            found.update(process.children(recursive=True))
    return found


def _part(words: str) -> str:
    if "postgres" in words or "_pg_" in words:
        return "database"
    return "daemon" if "broker.cli" in words else "skypilot"


def under_way(scene: Scene) -> int:
    """Return the number of launches in progress: a worker of SkyPilot holds a lock on a file for each."""
    files = {path.stat().st_ino for path in (scene.home / "providers" / "sky" / LAUNCHING).iterdir()}
    held = {int(line.split()[-3].rpartition(":")[2]) for line in Path("/proc/locks").read_text().splitlines()}
    return len(files & held)


async def highest(scene: Scene, until: asyncio.Event) -> Counter[str]:
    """Return the sample of `memory` with the most bytes, and the most launches that were under way."""
    worst: Counter[str] = Counter()
    most = 0
    while not until.is_set():
        now = await asyncio.to_thread(memory, scene)
        most = max(most, under_way(scene))
        worst = max(worst, now, key=lambda one: sum(one[part] for part in PARTS))
        worst["at_once"] = most
        try:
            async with asyncio.timeout(SAMPLE_S):
                await until.wait()
        except TimeoutError:
            continue
    return worst


async def beating(scene: Scene, jobs: list[str]) -> list[JobDetail]:
    """Wait for the first heartbeat of each job, and return the jobs."""
    waiting = (scene.until(job, "a beat", _beats, within_s=TIMEOUT_S + EACH_S * len(jobs)) for job in jobs)
    return list(await asyncio.gather(*waiting))


def _beats(detail: JobDetail) -> bool:
    return bool(detail.runs and detail.runs[-1].first_beat_at)


async def measure(launches: int) -> dict[str, Any]:
    """Measure with a new daemon and API server, so that no state of an earlier crowd is left."""
    async with Scene(clouds=("runpod",), providers={"sky": {"launches": launches}}) as scene:
        for pool in scene.clouds.runpod.pools:
            pool.free = max(pool.free, 8 * launches)
        await scene.next_market()
        warm = await submit_idle(scene, "runpod")
        await beating(scene, [warm])
        await end(scene, warm)
        idle, over = await asyncio.to_thread(memory, scene), asyncio.Event()
        watching = asyncio.create_task(highest(scene, over))
        begun, jobs = time.monotonic(), [await submit_idle(scene, "runpod") for _ in range(launches)]
        try:
            details = await beating(scene, jobs)
            wall = time.monotonic() - begun
        finally:
            over.set()
            worst = await watching
            await end(scene, *jobs)
    return _figures(launches, idle, worst, wall, sum(detail.attempts for detail in details))


def _figures(launches: int, idle: Counter[str], worst: Counter[str], wall: float, attempts: int) -> dict[str, Any]:
    figures = {
        "launches": launches,
        "at_once": worst["at_once"],
        "attempts": attempts,
        "peak_mb": {part: round(worst[part] / MIB) for part in PARTS},
        "peak_mb_all": round(sum(worst[part] for part in PARTS) / MIB),
        "idle_mb_all": round(sum(idle[part] for part in PARTS) / MIB),
        "skypilot_processes": worst["processes"],
        "seconds": round(wall, 1),
        "launches_per_min": round(60 * launches / wall, 2),
    }
    line = (
        "{launches:4} submitted, {at_once} at once: {peak_mb_all} MB at most ({peak_mb}, "
        "{skypilot_processes} processes of SkyPilot), {idle_mb_all} MB before; {seconds} s, {launches_per_min} a minute"
    )
    print(line.format(**figures), flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", default="1,4,20", help="a number, or several with commas")
    given = parser.parse_args()
    print(f"{os.cpu_count()} cores, {psutil.virtual_memory().total / 1024**3:.0f} GB", flush=True)
    runs = [asyncio.run(measure(int(count))) for count in given.launches.split(",")]
    print(json.dumps({"crowds": runs}))


if __name__ == "__main__":
    main()
