"""Faults of the daemon's host: a stopped process, few open files, little memory."""

import asyncio
import signal
import sys
from typing import Any

import psutil

from tests.crash.daemon import Daemon
from tests.crash.waits import Within
from tests.reliability.figures import Figures
from tests.reliability.installation import ENDED, POLL_S, WAIT_S, Installation, installation, refused_start, settled
from tests.reliability.registry import scenario

MEMORY_BYTES = 1024**3
LIMITED = f'ulimit -d {MEMORY_BYTES // 1024}; exec "$@"'
STOPPED_S = 8.0
JOBS, UPLOADS, UPLOAD_MB = 20, 12, 8


@scenario("a stopped daemon loses nothing: afterwards it is ready, and the job ends as if undisturbed")
async def stopped_daemon(figures: Figures) -> None:
    async with installation(figures) as running:
        running.process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(STOPPED_S)
        finally:
            running.process.send_signal(signal.SIGCONT)
        await running.ready()
        await running.ends_well()


@scenario("the start is refused in one line that names the limit and the fix")
async def few_open_files(figures: Figures) -> None:
    daemon = Daemon()
    daemon.command = ("sh", "-c", 'ulimit -n 64; exec "$@"', "sh", sys.executable, "-m", "broker.cli")
    try:
        line = await refused_start(daemon)
        assert "64" in line, line
        assert "ulimit -n" in line, line
        assert not (daemon.home / "postgres").exists()
    finally:
        await daemon.remove()


@scenario("20 jobs, 12 uploads of 8 MB and 40 quotes fit into 1 GiB; all are answered, and the jobs succeed")
async def one_gibibyte(figures: Figures) -> None:
    async with installation(figures, command=("sh", "-c", LIMITED, "sh")) as running:
        peak = asyncio.create_task(_peak_mb(running))
        rows = b"word,definition\n" + b"".join(b"w%07d,%s\n" % (n, b"d" * 90) for n in range(UPLOAD_MB * 10_000))
        async with running.daemon.client() as client:
            answers = await settled([client.upload(rows + b"%d,x\n" % n, name="a.csv") for n in range(UPLOADS)])
            refs = [answer.ref for answer in answers if not isinstance(answer, BaseException)]
            assert refs, answers
            data = {"path": refs[0], "prompt": "{word}", "completion": "{definition}"}
            spec: dict[str, Any] = {"name": "q", "cap_usd": "5", "train": {"model": MODEL, "data": data}}
            quotes = await settled([client.quote(spec) for _ in range(40)])
        jobs = [await running.submit(5) for _ in range(JOBS)]
        async with Within(WAIT_S, "all jobs end", running.log):
            states = [""]
            while not set(states) <= ENDED:
                await asyncio.sleep(POLL_S)
                states = [(await running.detail(job)).state for job in jobs]
        peak.cancel()
        figures.note("quoted", sum(not isinstance(quote, BaseException) for quote in quotes))
        figures.note("uploaded", len(refs))
        assert set(states) == {"succeeded"}
        await running.ends_well()
        assert figures.values["peak_mb"] < MEMORY_BYTES / 1e6


MODEL = "HuggingFaceTB/SmolLM2-135M"


async def _peak_mb(running: Installation) -> None:
    """Note the largest resident memory of the daemon and of its workers, without database and jobs."""
    while running.is_alive():
        total = 0
        for process in (running.process, *running.process.children()):
            try:
                if process.name() != "postgres":
                    total += process.memory_info().rss
            except psutil.Error:
                continue
        running.figures.note("peak_mb", max(total / 1e6, running.figures.values.get("peak_mb", 0.0)))
        await asyncio.sleep(POLL_S)
