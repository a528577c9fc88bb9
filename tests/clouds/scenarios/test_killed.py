"""SIGKILL of the daemon, of the API server and of both, at moments of a launch: one machine, no orphan, success.

A continuous integration run takes a sample that the commit chooses; `GPUBROKER_KILL_POINTS=all` runs all moments.
"""

import asyncio
import hashlib
import io
import os
import subprocess
import tarfile
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest

from broker.domain.job import JobState
from tests.clouds.bake import NoBake
from tests.clouds.machines import NoNamespaces
from tests.clouds.required import cannot
from tests.clouds.scenarios.scene import Scene

Victim = Literal["daemon", "server", "both"]
VICTIMS: tuple[Victim, ...] = ("daemon", "server", "both")
MOMENTS = 20
SAMPLE = 4
COUNT = b"""
import os, pathlib, time
file = pathlib.Path(os.environ["GPUBROKER_CHECKPOINT_DIR"]) / "count.txt"
count = int(file.read_text()) if file.exists() else 0
while count < 30:
    time.sleep(0.1)
    count += 1
    draft = file.with_suffix(".new")
    draft.write_text(str(count))
    draft.replace(file)
"""


def points() -> list[tuple[int, Victim]]:
    """Return (moment, victim) pairs: all, or the commit's sample, spread over the launch."""
    every = [(moment, VICTIMS[moment % len(VICTIMS)]) for moment in range(MOMENTS)]
    if os.environ.get("GPUBROKER_KILL_POINTS") == "all":
        return every
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout or "none"
    first = int(hashlib.sha256(commit.encode()).hexdigest(), 16) % (MOMENTS // SAMPLE)
    return every[first :: MOMENTS // SAMPLE]


@pytest.fixture(scope="module")
async def scene() -> AsyncIterator[Scene]:
    try:
        async with Scene(clouds=("runpod", "vast", "lambda")) as scene:
            yield scene
            assert scene.clouds.violations == []
            assert scene.secrets_seen() == []
    except (NoBake, NoNamespaces) as e:
        cannot(e)


async def submit(scene: Scene) -> str:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo("count.py")
        entry.size = len(COUNT)
        tar.addfile(entry, io.BytesIO(COUNT))
    spec: dict[str, Any] = {
        "name": "counting", "cap_usd": "5", "checkpoint": {"every_s": 2},
        "script": {"command": ["/srv/venv/bin/python", "count.py"]},
    }  # fmt: skip
    return await scene.submit(spec, buffer.getvalue(), name="code.tar")


@pytest.fixture(scope="module")
async def launch_s(scene: Scene) -> float:
    """Return seconds from submit to the first heartbeat, undisturbed and with a warm server."""
    for _ in range(2):
        begun = time.monotonic()
        job = await submit(scene)
        await scene.until(
            job,
            "a beat, or the end of a program that is shorter than its launch",
            lambda detail: detail.finished_at or (detail.runs and detail.runs[-1].first_beat_at),
        )
        lasted = time.monotonic() - begun
        await scene.rest(job)
    return lasted


@pytest.mark.parametrize(("moment", "victim"), points())
async def test_a_kill_leaves_one_machine_and_no_orphan(
    scene: Scene, launch_s: float, moment: int, victim: Victim
) -> None:
    job = await submit(scene)
    await asyncio.sleep(launch_s * moment / MOMENTS)  # real time, because the test varies the moment of the kill
    if victim in ("daemon", "both"):
        await scene.kill()
    if victim in ("server", "both"):
        await scene.kill_server()
    if victim in ("daemon", "both"):
        await scene.start()
    detail = await scene.rest(job)
    assert detail.state is JobState.SUCCEEDED, await scene.told(job)
    machines = await scene.rented(job)
    for name in await scene.names(job):
        assert sum(machine.name.startswith(name) for machine in machines) <= 1, "two machines under one name"
    assert scene.orphans() == []
    bill = await scene.bill(job)
    scene.money.append((detail.spent_usd, bill, scene.started(detail)))
    assert bill <= detail.spent_usd
