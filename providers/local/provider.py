"""Provider that offers this machine, with its GPUs or its CPU, to one job at a time."""

import asyncio
import itertools
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import psutil
from pydantic import Field

from broker.domain.errors import Rejected
from broker.domain.ids import Installation, InstanceName, attempt_of
from broker.domain.instance import BootSpec, Caps, InstanceState, Liveness, Observed
from broker.domain.job import Handle
from broker.domain.money import usd
from broker.domain.offer import GpuAsk, Offer
from broker.ports import Clock
from providers.local.gpus import Gpu, gpus
from providers.local.isolation import HostSandbox
from providers.local.launcher_locks import LauncherLocks
from providers.local.machine import Machine
from providers.local.process_backend import AGENT, ProcessBackend, has_trainer
from trainer.contract.base import Config

NAME = "local"
REGION = "this-machine"


class LocalConfig(Config):
    """This machine, offered as one instance."""

    usd_per_hour: Annotated[Decimal, Field(ge=0, le=1_000_000)] = Decimal(0)
    """Dollars that jobs are charged for an hour of this machine. Absent while a rented cloud is configured: only jobs
    with `resources.providers: [local]` run here, because a free machine would always be the cheapest.
    """
    boot_s: Annotated[float, Field(ge=0)] = 10.0
    """Typical seconds from start to the first heartbeat."""
    teams: tuple[str, ...] = ()
    """Teams whose jobs may run on this host once the installation has several users; empty: operators only."""
    trusted: bool = False
    """true: with several users, jobs of operators and `teams` run as the daemon's user, which can read all data. false:
    they run isolated, if this host can do that.
    """


class LocalProvider:
    """`ports.Provider` of this machine. No other provider uses the folder `state`."""

    name = NAME

    def __init__(
        self,
        config: LocalConfig,
        *,
        installation: Installation,
        state: Path,
        clock: Clock,
        argv: Sequence[str] = AGENT,
        detect: Callable[[], Awaitable[Sequence[Gpu]]] = gpus,
        sandbox: HostSandbox | None = None,
        beside_rented: bool = False,
    ) -> None:
        """Prepare the provider without detecting GPUs.

        `argv`: program of each machine. `detect`: returns the GPUs; called once, at the first offer. `sandbox`: builder
        of isolated machines. `beside_rented`: a rented cloud is configured, so a machine without a price, which would
        win by being free, runs only the jobs that name it.
        """
        self._config = config
        self._installation = installation
        self._state = state
        self._clock = clock
        self._launchers = LauncherLocks(state / "launchers")
        self._backend = ProcessBackend(
            state / "instances", provider=NAME, installation=installation, argv=argv, capacity=1, sandbox=sandbox
        )
        self._detect = detect
        self._named_only = beside_rented and "usd_per_hour" not in config.model_fields_set
        self._gpus: asyncio.Future[Sequence[Gpu]] | None = None

    @property
    def caps(self) -> Caps:
        return Caps(
            spot=False,
            teardown_s=1.0,
            boot_s=self._config.boot_s,
            boot_deadline_s=300.0,
            trust="own",
            self_stop="os_shutdown",
            reaches_local_files=True,
            runs_on_host=True,
            named_only=self._named_only,
            has_trainer=has_trainer(),
            lists_all=True,
        )

    @property
    def identity(self) -> str | None:
        return None

    @property
    def dropped(self) -> Mapping[str, int]:
        return {}

    async def offers(self, ask: GpuAsk) -> Sequence[Offer]:
        if ask.regions and REGION not in ask.regions:
            return []
        offer = await self._offer()
        if ask.accelerators and not any(
            offer.accelerator == name or offer.accelerator.startswith(name + "-") for name in ask.accelerators
        ):
            return []
        return [offer] if offer.gpus >= ask.min_gpus or offer.accelerator == "cpu" else []

    def launcher_id(self) -> str:
        return self._launchers.id

    async def launcher(self, launched_by: str, name: InstanceName) -> Liveness:
        return self._launchers.liveness(launched_by, name)

    async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        if attempt_of(self._installation, name) is None:
            raise Rejected(f"{name} is not a name of installation {self._installation}")
        if boot.nodes != 1:
            raise Rejected(f"{boot.nodes} nodes: this machine is a single node; ask for 1")
        machine = Machine(
            name=name, provider=NAME, region=REGION, accelerator=offer.accelerator, gpus=offer.gpus, spot=False,
            job=boot.job or "",
        )  # fmt: skip
        with self._launchers.creating(name):
            return [await self._backend.start(machine, boot)]

    async def list(self) -> Sequence[Observed]:
        return await self._backend.machines()

    async def destroy(self, handle: Handle) -> None:
        if handle.provider != NAME or attempt_of(self._installation, handle.name) is None:
            raise Rejected(f"{handle.name} at {handle.provider} is not a machine of installation {self._installation}")
        await self._backend.destroy(handle.name)

    async def confirm(self, handles: Sequence[Handle], offer: Offer, boot: BootSpec) -> None:
        """Do nothing: the listing has all facts about the machine."""

    async def cancel(self, name: InstanceName) -> None:
        """Do nothing: a create is too short to be cancelled."""

    async def reach(self, handle: Handle, command: Sequence[str], *, tty: bool) -> Sequence[str]:
        return self._backend.reach(handle.name, command)

    async def check(self) -> str | None:
        return None

    async def close(self) -> None:
        await self._backend.close()
        self._launchers.close()

    async def _offer(self) -> Offer:
        if self._gpus is None:
            self._gpus = asyncio.ensure_future(self._detect())
        gpus = await asyncio.shield(self._gpus)
        same = list(itertools.takewhile(lambda gpu: gpu == gpus[0], gpus))
        ram = psutil.virtual_memory().total
        machines = [machine for machine in await self._backend.machines() if machine.state is not InstanceState.GONE]
        busy_with = await self._backend.job(machines[0].handle.name) if machines else ""
        accelerator = same[0].accelerator if same else "cpu"
        kind = f"{len(same)}x-{accelerator}" if same else accelerator
        return Offer(
            id=f"{NAME}/{NAME}/{REGION}/{kind}/on-demand",
            provider=NAME,
            cloud=NAME,
            region=REGION,
            instance_type=kind,
            accelerator=accelerator,
            gpus=len(same),
            gpu_memory_bytes=same[0].memory_bytes if same else ram,
            vcpus=len(os.sched_getaffinity(0)),
            ram_bytes=ram,
            disk_bytes=shutil.disk_usage(self._state).free,
            spot=False,
            usd_per_hour=usd(self._config.usd_per_hour),
            on_demand_usd_per_hour=usd(self._config.usd_per_hour),
            available=not machines,
            busy_with=busy_with,
            reaches_local_files=True,
            seen_at=self._clock.now(),
        )
