"""Real daemon in its own process, with a simulated market whose machines are processes; tests kill it."""

import asyncio
import io
import json
import os
import shutil
import signal
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from broker.client.async_client import AsyncClient
from providers.local.process_marks import INSTANCE_DIR, kill_instance
from tests.crash.waits import Within
from tests.processes import processes_of

CONFIG: dict[str, Any] = {
    "port": 0,
    "providers": {
        "local": None,
        "simulated": {"seed": 1, "hazard_scale": 0, "sold_out": 0, "boot_s": 2},
    },
    "intervals": {
        "poll_s": 0.1, "look_s": 0.2, "list_s": 0.2, "billing_s": 0.3, "sweep_s": 1, "market_s": 5, "deadman_s": 1,
    },
    "limits": {"heartbeat_s": 0.3, "poll_s": 0.3, "log_s": 0.5, "drain_s": 10},
}  # fmt: skip
COUNT = """
import os, sys, time, pathlib
file = pathlib.Path(os.environ["GPUBROKER_CHECKPOINT_DIR"]) / "count.txt"
count = int(file.read_text()) if file.exists() else 0
print("from", count, flush=True)
to, resumed = int(sys.argv[1]), count > 0
while count < to or not (to or resumed):
    time.sleep(0.1)
    count += 1
    beside = file.with_suffix(".new")
    beside.write_text(str(count))
    beside.replace(file)
    print("count", count, flush=True)
"""


class Daemon:
    """Process of `gpubroker serve` on a home of its own."""

    def __init__(self, *, limits: Mapping[str, float] = {}, database_url: str | None = None, **simulated: Any) -> None:
        """Prepare. `database_url` None: the daemon embeds its own PostgreSQL."""
        self.home = Path(tempfile.mkdtemp(prefix="gb-"))
        config = json.loads(json.dumps(CONFIG))
        config["providers"]["simulated"] |= simulated
        config["limits"] |= limits
        config["database_url"] = database_url
        (self.home / "gpubroker.yaml").write_text(yaml.safe_dump(config))
        self.process: asyncio.subprocess.Process | None = None
        self.command: tuple[str, ...] = (sys.executable, "-m", "broker.cli")
        """Start of the command line, before `serve`."""

    async def start(self) -> None:
        client_file = self.home / "client.json"
        before = client_file.stat().st_mtime_ns if client_file.exists() else 0
        log = (self.home / "daemon.log").open("ab")
        self.process = await asyncio.create_subprocess_exec(
            *self.command, "serve", "--home", str(self.home), stdout=log, stderr=log,
        )  # fmt: skip
        async with Within(300, f"the start of {self.home}", self.log):
            while not client_file.exists() or client_file.stat().st_mtime_ns == before:
                assert self.process.returncode is None, self.log()
                await asyncio.sleep(0.02)

    async def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    async def stop(self) -> None:
        """Stop the daemon as an operator would, then end all other processes on this home."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            await self.process.wait()

    def client(self) -> AsyncClient:
        document = json.loads((self.home / "client.json").read_text())
        return AsyncClient(document["url"], document["token"])

    def log(self) -> str:
        return (self.home / "daemon.log").read_text()[-4000:]

    def processes(self) -> list[psutil.Process]:
        return processes_of(self.home)

    def preempt(self) -> None:
        """Preempt all machines of the job at once, without notice."""
        machines = [process for process in self.processes() if INSTANCE_DIR in process.environ()]
        for process in machines:
            process.suspend()  # none sees another one's end
        for folder in {Path(process.environ()[INSTANCE_DIR]) for process in machines}:
            kill_instance(folder, lambda: False)

    async def remove(self) -> None:
        await self.stop()
        for process in self.processes():
            process.kill()
        shutil.rmtree(self.home, ignore_errors=True)


def counting(to: int) -> tuple[bytes, dict[str, Any]]:
    """Return (code archive, spec without `code`) of a program that counts and resumes from its checkpoint.

    With `to` 0 the program counts until it is ended, and ends at once after a resume.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo("count.py")
        entry.size = len(COUNT.encode())
        tar.addfile(entry, io.BytesIO(COUNT.encode()))
    spec = {
        "name": "counting", "cap_usd": "5", "checkpoint": {"every_s": 1},
        "script": {"command": [sys.executable, "count.py", str(to)]},
    }  # fmt: skip
    return buffer.getvalue(), spec


async def submit(client: AsyncClient, to: int, **changes: Any) -> str:
    code, spec = counting(to)
    upload = await client.upload(code, name="code.tar", fmt=None)
    spec["script"] |= {"code": f"upload:{upload.sha256}", **changes.pop("script", {})}
    return str((await client.submit(spec | changes, key=os.urandom(8).hex())).id)
