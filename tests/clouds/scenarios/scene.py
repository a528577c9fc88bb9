"""The whole system on one machine: a real daemon and SkyPilot's real API server against emulated clouds.

The clouds have real machines; there is a real S3 (moto) and a hub with a real model."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar, Self

import psutil
import yaml

from broker.api.schemas.jobs import EventView, JobDetail
from broker.cli.jobs.artifacts import read_messages
from broker.client.async_client import AsyncClient
from broker.domain.ids import AttemptId, Installation, instance_name
from broker.domain.job import RESTING_JOB_STATES
from tests.clouds.aws import Aws
from tests.clouds.emulator import Clouds
from tests.clouds.hub import Hub
from tests.clouds.machine import Machines, PaperMachines
from tests.clouds.machines import NamespaceMachines
from tests.clouds.sky_rig import rsync
from tests.clouds.state import Rented
from tests.processes import processes_of

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
MODEL_FOLDER = Path(".demo/models/smollm2-135m-instruct")
IMAGE = "registry.example/gpubroker-trainer@sha256:" + "0" * 64
"""Image that no machine pulls, because the machines' root file system has its content."""
BUCKET = "gpubroker"
ON_DEMAND = {("g6e.xlarge", "us-east-1"): "1.861", ("p5.4xlarge", "us-east-1"): "6.88"}
SPOT = {("g6e.xlarge", "us-east-1a"): "0.79", ("g6e.xlarge", "us-east-1b"): "0.83"}
"""Dollars an hour at the emulated AWS."""
CENT = Decimal("0.01")
LARGE = 50_000_000
"""Bytes above which a file is not searched for keys, because it holds a model."""
SECRETS = ("test-key", "GPUBROKER_ATTEMPT_KEY=", "GPUBROKER_STORE_OPTIONS=")
"""Texts that no process may have in its arguments."""
INTERVALS = {"poll_s": 0.5, "look_s": 1.0, "list_s": 1.0, "billing_s": 5.0, "sweep_s": 5.0, "market_s": 5.0}
LIMITS = {"heartbeat_s": 2.0, "poll_s": 2.0, "log_s": 2.0, "drain_s": 60.0}
CLOUDS = ("runpod", "vast", "lambda", "aws")
GUARD_S = 1800.0
"""Seconds after which a hang ends. It is long because four machines that train share the cores of this one."""


class Scene:
    """Daemon, SkyPilot server and emulated clouds: `async with Scene(...) as scene:` ends all with the block."""

    on_end: ClassVar[list[Callable[["Scene"], None]]] = []
    """Functions that are called before a scene is closed."""

    def __init__(self, *, clouds: tuple[str, ...] = CLOUDS, paper: bool = False, **settings: Any) -> None:
        """Prepare. `paper`: no machine boots. `settings`: override the daemon's configuration by section."""
        self._names, self._paper, self._settings = clouds, paper, settings
        self._stack = AsyncExitStack()
        self.home = Path(tempfile.mkdtemp(prefix="gb-"))
        self._process: asyncio.subprocess.Process | None = None
        self.leaks: set[str] = set()
        """Command lines of this host in which a secret was seen."""
        self.money: list[tuple[Decimal, Decimal, Decimal]] = []
        """Spent, billed, and possible extra cost of started quanta, for each job whose ledger is closed."""
        self.clouds: Clouds
        self.aws: Aws
        self.hub: Hub
        self.s3 = ""

    async def __aenter__(self) -> Self:
        try:
            await self._build()
            await self.start()
            watch = asyncio.create_task(self._watch_argv())
            self._stack.callback(watch.cancel)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            for told in self.on_end if hasattr(self, "clouds") else ():
                told(self)
            await self._end()
        finally:
            await self._stack.aclose()
            shutil.rmtree(self.home, ignore_errors=True)

    async def _build(self) -> None:
        self.hub = await self._stack.enter_async_context(Hub({MODEL: MODEL_FOLDER}))
        machines: Machines = PaperMachines() if self._paper else await NamespaceMachines.open()
        self.clouds = await self._stack.enter_async_context(Clouds(machines))
        self.clouds.faults.limits.enforced = True
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.aws = await self._stack.enter_async_context(Aws(self.clouds.world))
        self.aws.front.on_demand.update(ON_DEMAND)
        self.aws.front.spot.update(SPOT)
        self.s3 = self.aws.front.moto
        if isinstance(machines, NamespaceMachines):
            inside = {int(url.rpartition(":")[2]) for url in (self.s3, self.hub.url)}
            machines.forwards.update({port: ("127.0.0.1", port) for port in inside})
        self.aws.write_catalog(self.home / "providers/sky/home/.sky/catalogs/v8/aws")
        s3 = self.aws.client("us-east-1", "s3")
        await asyncio.to_thread(s3.create_bucket, Bucket=BUCKET)
        (self.home / "gpubroker.yaml").write_text(yaml.safe_dump(self.configuration()))

    def configuration(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "port": 0,
            "blobs": f"s3://{BUCKET}/installation",
            "blob_options": {"aws_endpoint": self.s3, "aws_region": "us-east-1"},
            "grants": {"sts_endpoint": self.s3, "role_arn": "arn:aws:iam::123456789012:role/attempt"},
            "trainer": {"image": IMAGE},
            "intervals": INTERVALS,
            "limits": LIMITS,
            "providers": {"local": None, "sky": {"config": dict(self.aws.sky_config)}},
        }
        for name in self._names:
            config["providers"][name] = {"endpoint": self.clouds.url, "emulated": True}
        if "aws" in self._names:
            config["providers"]["aws"] |= {"endpoint": self.aws.url, "regions": ["us-east-1"]}
        for section, values in self._settings.items():
            config[section] = _merged(config.get(section), values)
        return config

    def environment(self) -> dict[str, str]:
        """Return a user's environment with a key for each cloud: `test-key`, which no machine may ever see."""
        kept = {name: os.environ[name] for name in ("LANG", "TZ", "VIRTUAL_ENV") if name in os.environ}
        kept["PATH"] = os.environ["PATH"] if self._paper else rsync(self.home)
        keys = dict.fromkeys(("RUNPOD_API_KEY", "VAST_API_KEY", "LAMBDA_API_KEY"), "test-key")
        aws = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "test-key", "AWS_REGION": "us-east-1"}
        aws |= self.aws.environment
        return {**kept, **keys, **aws, "HOME": str(self.home / "user"), "HF_ENDPOINT": self.hub.url}

    # --------------------------------------------------------------------------------------------------- the daemon

    async def start(self) -> None:
        (self.home / "user").mkdir(exist_ok=True)
        client_file = self.home / "client.json"
        before = client_file.stat().st_mtime_ns if client_file.exists() else 0
        with (self.home / "daemon.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "broker.cli", "serve", "--home", str(self.home),
                stdout=log, stderr=log, env=self.environment(),
            )  # fmt: skip
        async with asyncio.timeout(GUARD_S):
            while not client_file.exists() or client_file.stat().st_mtime_ns == before:
                assert self._process.returncode is None, self.log()
                await asyncio.sleep(0.05)

    async def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    async def kill_server(self) -> None:
        """Kill the API server's main process, like the kernel when memory runs out; its workers continue."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # one that ends while it is looked at
                if "sky.server.server" in " ".join(process.cmdline()):
                    process.kill()

    async def _end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            await self._process.wait()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def client(self) -> AsyncClient:
        document = json.loads((self.home / "client.json").read_text())
        return AsyncClient(document["url"], document["token"])

    def log(self) -> str:
        return (self.home / "daemon.log").read_text()[-60_000:]

    def processes(self) -> list[psutil.Process]:
        return processes_of(self.home)

    async def _watch_argv(self) -> None:
        """Watch the arguments of all processes for secrets, because other users of the host can read them."""
        while True:
            for process in psutil.process_iter():
                try:
                    line = " ".join(process.cmdline())
                except psutil.Error:
                    continue
                if any(secret in line for secret in SECRETS):
                    self.leaks.add(line[:300])
            await asyncio.sleep(0.2)

    def cli(self, *words: str) -> tuple[int, str, str]:
        """Run the command line as a user of this home; return (exit code, output, errors)."""
        done = subprocess.run(
            [sys.executable, "-m", "broker.cli", *words], capture_output=True, text=True, stdin=subprocess.DEVNULL,
            env={**self.environment(), "GPUBROKER_HOME": str(self.home)},
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    async def next_market(self) -> None:
        """Wait until the broker has polled every cloud's prices once more."""
        async with self.client() as client:
            before = {s.name: s.seen_at for s in (await client.providers()).items}
            async with asyncio.timeout(GUARD_S):
                while any(s.seen_at == before[s.name] for s in (await client.providers()).items):  # noqa: ASYNC110
                    await asyncio.sleep(0.2)

    # ------------------------------------------------------------------------------------------------------- the jobs

    async def submit(self, spec: Mapping[str, Any], data: bytes, *, name: str = "data.csv") -> str:
        async with self.client() as client:
            upload = await client.upload(data, name=name, fmt="tar" if name.endswith(".tar") else None)
            body = json.loads(json.dumps(spec))
            if "train" in body:
                body["train"]["data"]["path"] = upload.ref
            else:
                body["script"]["code"] = upload.ref
            return str((await client.submit(body, key=os.urandom(8).hex())).id)

    async def job(self, job: str) -> JobDetail:
        async with self.client() as client:
            return await client.job(job)

    async def rest(self, job: str, *, within_s: float = GUARD_S) -> JobDetail:
        """Wait until the job is terminal, and return it. A failure shows its events and the daemon's log."""
        try:
            async with asyncio.timeout(within_s):
                while (detail := await self.job(job)).state not in RESTING_JOB_STATES:  # noqa: ASYNC110
                    await asyncio.sleep(0.5)
                return detail
        except TimeoutError:
            raise AssertionError(await self.told(job)) from None

    async def until(self, job: str, what: str, holds: Any, *, within_s: float = GUARD_S) -> JobDetail:
        """Wait until `holds(job)`, and return the job. A failure shows its events and the daemon's log."""
        try:
            async with asyncio.timeout(within_s):
                while not holds(detail := await self.job(job)):
                    assert detail.state not in RESTING_JOB_STATES, await self.told(job)
                    await asyncio.sleep(0.25)
                return detail
        except TimeoutError:
            raise AssertionError(f"waited for {what}\n{await self.told(job)}") from None

    async def events(self, job: str) -> list[EventView]:
        async with self.client() as client:
            return list((await client.events_now(job)).items)

    async def told(self, job: str) -> str:
        lines = [f"{event.at} {event.kind}: {event.message}" for event in await self.events(job)]
        for run in (await self.job(job)).runs:
            lines.append(f"attempt {run.number} {run.state}: {run.detail}")
        log = [line for line in self.log().splitlines() if "gpubroker.access" not in line]
        return "\n".join([*lines, *log[-40:]])

    # ---------------------------------------------------------------------------------------------------- the clouds

    async def names(self, job: str) -> list[str]:
        """Return the machine names of a job's attempts, in order; clouds add a suffix."""
        installation = Installation((self.home / "installation").read_text().strip())
        return [instance_name(installation, AttemptId(run.id)) for run in (await self.job(job)).runs]

    async def rented(self, job: str) -> list[Rented]:
        """Return every machine ever made for a job, in order."""
        names = await self.names(job)
        return [r for r in self.clouds.world.rented.values() if any(r.name.startswith(n) for n in names)]

    async def bill(self, job: str) -> Decimal:
        """Return the clouds' charges for a job, by their own log."""
        return sum((self.clouds.bill().usd(name) for name in await self.names(job)), Decimal(0))

    @staticmethod
    def started(detail: JobDetail) -> Decimal:
        """Return the possible cost of a second at either end where time is billed in minutes."""
        offers = [run.offer for run in detail.runs if run.create_sent_at]
        return sum((o.usd_per_hour * o.billing_quantum_s / 3600 for o in offers if o.billing_quantum_s > 1), Decimal(0))

    @staticmethod
    def agrees(spent: Decimal, bill: Decimal, started: Decimal) -> bool:
        """Return True if the ledger and the bill agree to the cent, except for started quanta."""
        return bill - CENT < spent < bill + CENT + started

    def orphans(self) -> list[str]:
        """Return machines that still cost money."""
        return list(self.clouds.bill().open())

    def secrets_seen(self) -> list[str]:
        """Return the places where an account key is visible to a machine: in the request for it, or on its disk."""
        found = []
        for rented in self.clouds.world.rented.values():
            if "test-key" in json.dumps(rented.request, default=str):
                found.append(f"the request for {rented.name}")
            root = rented.machine.root if rented.machine else None
            if root is not None:
                found += [str(path.relative_to(root)) for path in _holding(root, b"test-key")]
        return found


def _holding(root: Path, needle: bytes) -> list[Path]:
    found = []
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size < LARGE and needle in path.read_bytes():
            found.append(path)
    return found


def _merged(base: Any, over: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return {**base, **{key: _merged(base.get(key), value) for key, value in over.items()}}


def fine_tune(hub: str, *, steps: int = 4, **changes: Any) -> dict[str, Any]:
    """Return a real LoRA fine-tune of SmolLM2, a few steps long."""
    spec: dict[str, Any] = {
        "name": "cynic", "cap_usd": "20",
        "env": {"HF_ENDPOINT": hub},
        "train": {
            "model": MODEL,
            "data": {
                "prompt": "Word: {word} ({part_of_speech})\nDefinition:", "completion": " {definition}",
                "eval_share": 0,
            },
            "method": {"kind": "lora", "r": 4}, "max_steps": steps, "global_batch": 2, "micro_batch": 2,
            "max_length": 64,
        },
        "checkpoint": {"every_s": 2},
    }  # fmt: skip
    return spec | changes


async def losses(scene: Scene, job: str) -> dict[int, float]:
    """Return loss by step, of all attempts of a job together."""
    async with scene.client() as client:
        return dict((await read_messages(client, job)).losses)


def elapsed(since: float) -> float:
    return round(time.monotonic() - since, 1)
