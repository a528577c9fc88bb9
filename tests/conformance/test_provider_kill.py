"""kill -9 of the process that creates a real machine, at any moment: no machine stays, or one machine that is
listed.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from broker.domain.ids import AttemptId, Installation, InstanceName, base32, instance_name
from providers.local.process_marks import instances_with_processes
from providers.local.provider import LocalConfig, LocalProvider
from tests.unit.providers.clocks import SteppedClock

OURS = Installation("aaaa")
CREATOR = """
import asyncio, json, os, sys
from pathlib import Path
from broker.runtime.clock import SystemClock
from broker.domain.ids import Installation
from broker.domain.instance import BootSpec
from broker.domain.offer import GpuAsk
from providers.local.provider import LocalConfig, LocalProvider
import psutil

async def create(state, name):
    provider = LocalProvider(LocalConfig(), installation=Installation("aaaa"), state=Path(state), clock=SystemClock(),
                             argv=("sleep", "1000"))
    offer, = await provider.offers(GpuAsk())
    await provider.create(name, offer, BootSpec(env={}, secret_env={"SECRET": "x" * 200000}))

for line in sys.stdin:
    state, name = json.loads(line)
    if not (pid := os.fork()):
        asyncio.run(create(state, name))
        os._exit(0)
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("dead", flush=True)
"""


async def test_a_creator_that_is_killed_leaves_nothing_or_one_machine(tmp_path: Path) -> None:
    provider = LocalProvider(LocalConfig(), installation=OURS, state=tmp_path, clock=SteppedClock())
    root, draw, left = (tmp_path / "instances").resolve(), random.Random(7), 0
    # Forks from a process without threads, so that 40 creates need not import everything again.
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CREATOR, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert server.stdin
    assert server.stdout

    async def begin() -> tuple[InstanceName, int]:
        assert server.stdin
        assert server.stdout
        name = instance_name(OURS, AttemptId(base32(os.urandom(9), 13)))
        server.stdin.write((json.dumps([str(tmp_path), name]) + "\n").encode())
        return name, int(await server.stdout.readline())

    try:
        name, _ = await begin()
        begun = time.monotonic()
        assert await server.stdout.readline() == b"dead\n"
        whole_s = time.monotonic() - begun
        for machine in await provider.list():
            await provider.destroy(machine.handle)
        kills = 0
        # A machine that is busy now or was at the first create misses the moments of interest, until it hits them.
        while kills < 40 or (kills < 120 and not 0 < left < kills):
            if kills >= 40:
                whole_s = min(1.2 * whole_s, 10.0) if left == 0 else 0.8 * whole_s
            kills += 1
            name, creator = await begin()
            await asyncio.sleep(draw.uniform(0.0, 1.3 * whole_s))
            with suppress(ProcessLookupError):
                os.kill(creator, signal.SIGKILL)
            assert await server.stdout.readline() == b"dead\n"
            machines = await provider.list()
            assert {m.handle.name for m in machines} <= {name}
            assert instances_with_processes(root) <= {m.handle.name for m in machines}
            left += len(machines)
            for machine in machines:
                await provider.destroy(machine.handle)
            assert await provider.list() == []
            assert instances_with_processes(root) == set()
    finally:
        server.stdin.close()
        await server.wait()
    assert 0 < left < kills, "the kills missed the moments of interest"
