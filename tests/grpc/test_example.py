"""The program in docs/reference/grpc.md does what it says."""

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from broker.api.service.interfaces import Settings
from broker.domain.job import JobState
from broker.ports import JobFilter
from broker.runtime.clock import SystemClock
from tests.api.harness import SETTINGS
from tests.api.test_feeds import happens
from tests.parity.servers import ApiServers, standing
from tests.support.memory_store.store import MemoryStore

ROOT = Path(__file__).parents[2]
GUARD_S = 300
"""Seconds after which a hanging example is killed, on a busy machine; otherwise it ends by itself."""


@pytest.fixture
async def servers() -> AsyncIterator[ApiServers]:
    """Yield servers whose upload limit suffices for the example's data set."""
    async with standing(
        MemoryStore(SystemClock()), "grpc", settings=replace(SETTINGS, upload_bytes=Settings.upload_bytes)
    ) as made:
        yield made


async def test_the_example_submits_and_watches_to_the_end(servers: ApiServers, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "reference" / "grpc.md").read_text(), re.DOTALL)
    program = program.replace("timeout=30", f"timeout={GUARD_S}")
    home = tmp_path / ".local" / "state" / "gpubroker"
    home.mkdir(parents=True)
    token = (await servers.api.token("ada"))["Authorization"].removeprefix("Bearer ")
    (home / "client.json").write_text(json.dumps({"grpc": f"127.0.0.1:{servers.port}", "token": token}))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-u", "-c", program, cwd=ROOT,
        env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(GUARD_S):
            first = (await process.stdout.readline()).decode()
            assert "devils-dictionary submitted" in first, first + (await process.stdout.read()).decode()
            (job,) = await servers.api.service.store.jobs(JobFilter())
            await happens(servers.api, job.id, "job.failed", end=JobState.FAILED)
            rest = (await process.stdout.read()).decode()
            assert await process.wait() == 0, rest
    finally:
        if process.returncode is None:
            process.kill()
    assert rest.split("\n") == ["job.failed", "state: JOB_STATE_FAILED", "", ""]
