"""Separate daemon for a run that costs money, and the destruction of everything that it rented."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import psutil
import yaml

from broker.api.schemas.jobs import JobDetail
from broker.client.async_client import AsyncClient
from broker.client.transport.errors import ClientError
from broker.controllers.termination import offline_sweep as outside
from broker.domain.errors import ProviderError
from broker.domain.ids import Installation
from broker.domain.instance import InstanceState, Observed
from broker.domain.job import RESTING_JOB_STATES
from broker.runtime.clock import SystemClock
from providers.common.cloud import Cloud
from providers.registry import CLOUD_CLASSES, ProvidersConfig

OVERRIDDEN_KEYS = ("providers", "home", "port", "database_url")
"""Keys that the run sets itself, in place of the user's configuration."""
POLL_S = 5.0
START_S, END_S, SWEEP_S = 180.0, 900.0, 1200.0


class LiveInstallation:
    """Home of one run. It is not deleted, because it identifies the run's machines."""

    def __init__(self, home: Path, clouds: list[str], given: Mapping[str, Any]) -> None:
        """Prepare. `given`: path of a gpubroker.yaml whose blob store is a bucket."""
        self.home, self.clouds = home, clouds
        sections = given.get("providers") or {}
        chosen = {name: sections.get(name) or {} for name in clouds}
        own = {"port": 0, "providers": {"local": None, **chosen, **{k: sections[k] for k in ("sky",) if k in sections}}}
        self.configuration = {key: value for key, value in given.items() if key not in OVERRIDDEN_KEYS} | own
        self.jobs: list[str] = []
        self._process: asyncio.subprocess.Process | None = None
        self._natives: dict[str, Cloud] = {}

    @property
    def config_file(self) -> Path:
        return self.home / "gpubroker.yaml"

    def endpoint(self, cloud: str) -> str | None:
        """Return the address of an emulator or a proxy, if the configuration names one."""
        found: str | None = self.configuration["providers"][cloud].get("endpoint")
        return found

    @property
    def installation(self) -> Installation:
        return Installation((self.home / "installation").read_text().strip())

    # ------------------------------------------------------------------------------------------------------ the daemon

    async def start(self) -> None:
        """Start the daemon. Raises RuntimeError with the end of its log if it does not start."""
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.config_file.write_text(yaml.safe_dump(self.configuration))
        client_file = self.home / "client.json"
        client_file.unlink(missing_ok=True)
        with (self.home / "daemon.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "broker.cli", "serve", "--home", str(self.home), stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        async with asyncio.timeout(START_S):
            while not client_file.exists():
                if self._process.returncode is not None:
                    raise RuntimeError(f"the daemon does not start: {self.log()[-500:]}")
                await asyncio.sleep(0.1)

    async def kill(self) -> None:
        """Kill the daemon and its SkyPilot server, as a power failure would."""
        assert self._process is not None
        self._process.kill()
        await self._process.wait()
        self.end_processes()

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            await self._process.wait()
        self.end_processes()

    def end_processes(self) -> None:
        """Kill the processes that have this home in their environment or arguments: the API server, which outlives the
        daemon.
        """
        for process in psutil.process_iter():
            try:
                told = " ".join(process.cmdline()) + " ".join(process.environ().values())
                if str(self.home) in told and process.pid != os.getpid():
                    process.kill()
            except psutil.Error:
                continue

    def log(self) -> str:
        return (self.home / "daemon.log").read_text(errors="replace")

    def client(self) -> AsyncClient:
        document = json.loads((self.home / "client.json").read_text())
        return AsyncClient(document["url"], document["token"])

    # -------------------------------------------------------------------------------------------------------- the jobs

    async def submit(self, spec: Mapping[str, Any], data: Path) -> str:
        async with self.client() as client:
            upload = await client.upload(data.read_bytes(), name=data.name)
            body = json.loads(json.dumps(spec))
            body["train"]["data"]["path"] = upload.ref
            job = str((await client.submit(body, key=os.urandom(8).hex())).id)
        self.jobs.append(job)
        return job

    async def until(self, job: str, what: str, holds: Callable[[JobDetail], bool], *, within_s: float) -> JobDetail:
        """Wait until `holds(job)`, and return the job. Raises AssertionError if it ends before, or after a timeout."""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    async with self.client() as client:
                        detail = await client.job(job)
                    if holds(detail):
                        return detail
                    if detail.state in RESTING_JOB_STATES:
                        raise AssertionError(f"{what}: the job is {detail.state}: {detail.reason}")
                    await asyncio.sleep(2.0)
        except TimeoutError:
            raise AssertionError(f"{what}: not within {within_s:.0f} s") from None

    async def spent(self) -> Decimal:
        """Return the sum of all jobs' ledgers."""
        async with self.client() as client:
            return sum([(await client.job(job)).spent_usd for job in self.jobs], Decimal(0))

    async def cancel_all(self) -> None:
        """Ask every job to stop, and wait for them for a while."""
        for job in self.jobs:
            try:
                async with self.client() as client:
                    if (await client.job(job)).state in RESTING_JOB_STATES:
                        continue
                    await client.cancel(job)
                await self.until(job, "cancelled", lambda d: d.state in RESTING_JOB_STATES, within_s=END_S)
            except (ClientError, AssertionError) as e:
                print(f"  job {job}: {e}; the sweep ends its machines")

    # ------------------------------------------------------------------------------------------------------ the clouds

    def native(self, cloud: str) -> Cloud:
        """Return the cloud's own API, past the daemon."""
        if cloud not in self._natives:
            sections = ProvidersConfig.model_validate(self.configuration["providers"]).rented()
            make, _ = CLOUD_CLASSES[cloud]
            self._natives[cloud] = make(
                sections[cloud], installation=self.installation, clock=SystemClock(), env=os.environ, home=Path.home()
            )
        return self._natives[cloud]

    async def machines(self, cloud: str) -> list[Observed]:
        """Return the machines of this run that may cost money. Raises ProviderError."""
        return [one for one in await self.native(cloud).list() if one.state is not InstanceState.GONE]

    async def close(self) -> None:
        for native in self._natives.values():
            await native.close()


async def sweep(installation: LiveInstallation) -> dict[str, str]:
    """Destroy every machine of the run, until each cloud lists none twice; return what is left, by cloud."""
    left: dict[str, str] = {}
    for cloud in installation.clouds:
        try:
            async with asyncio.timeout(SWEEP_S):
                await _sweep(installation, cloud)
        except (ProviderError, TimeoutError, OSError) as e:
            left[cloud] = str(e) or "machines still stand after so long a time"
    return left


async def _sweep(installation: LiveInstallation, cloud: str) -> None:
    """Destroy until two listings a list lag apart are empty; a running create may show only in the second."""
    native, clock, empty = installation.native(cloud), SystemClock(), 0
    while empty < 2:
        if standing := await installation.machines(cloud):
            empty = 0
            for machine in standing:
                print(f"  sweep: destroying {machine.handle.name} ({machine.handle.id}) at {cloud}")
                found_machine = outside.FoundMachine(provider=cloud, observed=machine, orphan="the run has ended")
                if why := await outside.destroy(found_machine, native, clock):  # type: ignore[arg-type]  # it lists and destroys
                    raise ProviderError(f"{machine.handle.name} ({machine.handle.id}) stands: {why}")
            continue
        empty += 1
        if empty < 2:
            await asyncio.sleep(native.caps.list_lag_s)
