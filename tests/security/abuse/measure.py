"""Measures a daemon during an attack: another team's latency, its memory, and stalls of its event loop."""

import asyncio
import json
import math
import re
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import psutil

from tests.security.abuse.target import MEMORY_BYTES, Target

P99_MS, PEAK_MB, STALL_MS = 500.0, MEMORY_BYTES / 1e6, 1000.0
"""Limits of one attack: p99 of the other team's calls, resident memory, largest stall of the event loop."""
LAG = re.compile(r"^gpubroker_event_loop_lag_seconds (\S+)$", re.MULTILINE)


@dataclass
class Measured:
    """Figures of one attack."""

    latencies_ms: list[float] = field(default_factory=list)
    failed: int = 0
    """Number of the other team's calls that were not answered with 200."""
    peak_mb: float = 0.0
    stall_ms: float = 0.0
    alive: bool = True

    @property
    def p99_ms(self) -> float:
        ordered = sorted(self.latencies_ms)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else math.inf

    @property
    def survived(self) -> bool:
        """True if the daemon lives, answered every call of the other team, and kept its limits."""
        return (
            self.alive and not self.failed and self.p99_ms < P99_MS and self.peak_mb < PEAK_MB
            and self.stall_ms < STALL_MS
        )  # fmt: skip


async def measured(target: Target, attack: Callable[[], Awaitable[None]]) -> Measured:
    """Run an attack, and measure until it ends."""
    figures, before_ms = Measured(), await _stall_ms(target)
    memory = asyncio.create_task(_memory(target, figures))
    other = await _other_team(target)
    try:
        await attack()
    finally:
        memory.cancel()
        await asyncio.gather(memory, return_exceptions=True)
        output, _ = await other.communicate(b"")  # closes its input
    answered = json.loads(output)
    figures.latencies_ms, figures.failed = answered["latencies_ms"], answered["failed"]
    figures.alive = target.is_alive()
    if figures.alive:
        after_ms = await _stall_ms(target)
        figures.stall_ms = after_ms if after_ms != before_ms else 0.0  # the same peak is of an earlier attack
    return figures


async def _other_team(target: Target) -> asyncio.subprocess.Process:
    """Start the other team's calls; they end with `communicate`."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.security.abuse.other_team", stdin=pipe, stdout=pipe
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps({"url": target.url, "token": target.other}).encode() + b"\n")
    await process.stdin.drain()
    return process


async def _memory(target: Target, figures: Measured) -> None:
    """Sum the resident memory of the daemon and of its workers, without the database."""
    while target.is_alive():
        try:
            process = target.process
            own = [process, *(child for child in process.children(recursive=True) if "postgres" not in child.name())]
            figures.peak_mb = max(figures.peak_mb, sum(_resident_mb(each) for each in own))
        except psutil.Error:
            pass
        await asyncio.sleep(0.05)


def _resident_mb(process: psutil.Process) -> float:
    try:
        return float(process.memory_info().rss) / 1e6
    except psutil.Error:
        return 0.0


async def _stall_ms(target: Target) -> float:
    headers = {"Authorization": f"Bearer {target.admin}"}
    async with target.http.get(f"{target.url}/metrics", headers=headers) as answer:
        found = LAG.search(await answer.text())
    return float(found[1]) * 1000 if found else math.inf
