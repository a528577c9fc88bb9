"""Provider of a rented cloud: the cloud's own API lists and destroys machines, and SkyPilot creates them.

SkyPilot lists machines from its own database, which may lose machines. The broker therefore lists them at the cloud.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from broker.domain.errors import NoCapacity, OutcomeUnknown, ProviderError, Rejected, Throttled
from broker.domain.ids import Installation, InstanceName, attempt_of
from broker.domain.instance import BootSpec, Caps, InstanceState, Liveness, Observed
from broker.domain.job import Handle
from broker.domain.offer import GpuAsk, Offer
from providers.common.account_guard import Account, Owned
from providers.common.machine_task import MachineTask, image_refused, reaching, task_of
from providers.common.market_rules import OfferFilter
from providers.common.start_watch import StartWatch

log = logging.getLogger(__name__)

EMULATED_START_S = 30.0
"""Largest `Caps.agent_start_s` of an emulator's machine in seconds, so that tests wait no longer than needed."""
APPEAR_S = 2.0
"""Seconds between two listings while a launched machine is not listed yet."""
CONFIRMS, CONFIRM_S = 5, 10.0
"""Attempts to confirm a launched machine at a cloud that throttles, and the longest pause between them in seconds."""


@dataclass(frozen=True, kw_only=True)
class Purchase:
    """Launch request for one offer, in SkyPilot's terms."""

    cloud: str
    """SkyPilot's name of the cloud: runpod, lambda, vast, aws."""
    region: str
    zone: str | None = None
    instance_type: str
    use_spot: bool
    disk_gb: int = 100
    catalog: Mapping[str, Sequence[Mapping[str, str]]] = field(default_factory=dict)
    """Rows that SkyPilot's catalog needs before the launch, by file (`runpod/vms.csv`). A row: value by column."""
    config: Mapping[str, object] = field(default_factory=dict)
    """SkyPilot configuration of this launch only, e.g. `{"vast": {"create_instance_kwargs": {"price": 0.2}}}`."""
    pin: Mapping[str, str] = field(default_factory=dict)
    """Exact product that the server plugin buys; without a pin SkyPilot buys the first product that it finds."""
    network_tier: str | None = None
    """SkyPilot's `network_tier`; None: SkyPilot's default."""
    refusal_may_leave_machine: bool = False
    """True if the cloud may keep a machine although it refused the create, as Vast does with a bid that is too low."""
    launch_interval_s: float = 0.0
    """Shortest time in seconds between two launches at this cloud."""


class Cloud(Owned, Protocol):
    """Native API of one cloud."""

    @property
    def caps(self) -> Caps: ...
    @property
    def docker_run(self) -> bool:
        """True if machines cannot be created from an image, so the task starts the image with `docker run`."""
        ...

    async def rows(self, offer_filter: OfferFilter) -> None:
        """Add every current offer to `offer_filter`. Raises Rejected, Throttled, OutcomeUnknown."""
        ...

    def source(self) -> str:
        """Return the source of the credentials in use: a variable, a file or a profile. Makes no call."""
        ...

    async def list(self) -> Sequence[Observed]: ...
    async def destroy(self, handle: Handle) -> None: ...
    async def check(self) -> str | None: ...
    def purchase(self, offer: Offer, boot: BootSpec) -> Purchase: ...
    async def confirm(self, handle: Handle, purchase: Purchase) -> None:
        """Check requirements of a launched machine that `list` does not report. Raises Rejected."""
        ...

    async def close(self) -> None: ...


class Launcher(Protocol):
    """Launcher of machines through SkyPilot, shared by all clouds of a daemon; see `providers.skypilot.launcher`."""

    @property
    def id(self) -> str:
        """Return the id of the API server that would execute a launch now; known before the server starts."""
        ...

    async def launch(self, name: InstanceName, purchase: Purchase, task: MachineTask) -> None:
        """Return once the task has been started on every node. Raises the broker's ProviderErrors."""
        ...

    async def liveness(self, launched_by: str, name: InstanceName) -> Liveness: ...
    async def started(self, name: InstanceName) -> bool | str:
        """Return True if the task runs or has run, False if not yet, or the reason of its failure.

        The reason is one line without secrets. Raises the broker's ProviderErrors.
        """
        ...

    async def ssh(self, name: InstanceName, *, tty: bool) -> Sequence[str]:
        """Return argv to which one word for the shell of node 0 may be appended. Raises Rejected if unreachable."""
        ...

    async def cancel(self, name: InstanceName) -> None: ...
    async def forget(self, name: InstanceName) -> None:
        """Delete SkyPilot's record of the cluster once the cloud reports it absent. Never raises."""
        ...

    async def close(self) -> None:
        """Release resources; running launches continue. May be called repeatedly, because clouds share the launcher."""
        ...


class CloudProvider:
    """`ports.Provider` of one rented cloud."""

    def __init__(
        self, cloud: Cloud, launcher: Launcher, account: Account, *, installation: Installation, emulated: bool = False
    ) -> None:
        """`emulated`: an emulator serves the endpoints, so machines compute on a CPU and cost no money."""
        self._cloud, self._launcher, self._account = cloud, launcher, account
        self._installation = installation
        self._emulated = emulated
        self.dropped: Mapping[str, int] = {}
        self._unknown_settings: Sequence[str] = ()
        """Configured values that the cloud did not know at the latest poll of offers."""
        self._watch = StartWatch(launcher.started)
        self._turn = asyncio.Lock()
        self._next_launch = 0.0
        self._listed_machines: Sequence[Handle] = ()
        """Machines in the latest listing that were not gone."""

    @property
    def name(self) -> str:
        return self._cloud.name

    @property
    def caps(self) -> Caps:
        caps = self._cloud.caps
        if not self._emulated:
            return caps
        return replace(caps, simulated=True, agent_start_s=min(caps.agent_start_s or 0.0, EMULATED_START_S))

    @property
    def identity(self) -> str | None:
        account = f", account {self._account.mark}" if self._account.mark else ""
        return f"{self._cloud.source()}{account}"

    async def offers(self, ask: GpuAsk) -> Sequence[Offer]:
        await self._account.verify()  # offer nothing if the account's machines cannot be listed
        offer_filter = OfferFilter(ask)
        await self._cloud.rows(offer_filter)
        self.dropped = offer_filter.dropped
        self._warn_of_unknown_settings(offer_filter.unknown_settings)
        if not self._emulated:
            return offer_filter.offers
        return [replace(offer, emulated_on="cpu", simulated=True) for offer in offer_filter.offers]

    def _warn_of_unknown_settings(self, unknown: Sequence[str]) -> None:
        for line in unknown:
            if line not in self._unknown_settings:
                log.warning("%s: %s", self.name, line)
        self._unknown_settings = unknown

    def launcher_id(self) -> str:
        return self._launcher.id

    async def launcher(self, launched_by: str, name: InstanceName) -> Liveness:
        return await self._launcher.liveness(launched_by, name)

    async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        if attempt_of(self._installation, name) is None:
            raise Rejected(f"{name} is not a name of installation {self._installation}")
        if boot.nodes > 1 and not self.caps.multi_node:
            raise Rejected(f"{self.name} cannot run one job on several machines; ask for 1 node")
        if boot.image is not None and not self.caps.images:
            raise Rejected(f"{self.name} runs no image of a job; leave out script.image")
        if any(machine.handle.name == name for machine in await self._list()):
            # SkyPilot would adopt machines of this name, repeat their setup, and loop forever if some are missing.
            raise OutcomeUnknown(f"{name} exists at {self.name} already; it is not launched again")
        purchase = self._cloud.purchase(offer, boot)
        await self._await_launch_interval(purchase.launch_interval_s)
        try:
            await self._launcher.launch(name, purchase, task_of(boot, docker_run=self._cloud.docker_run))
        except (NoCapacity, Rejected) as e:
            if purchase.refusal_may_leave_machine:
                await self._check_nothing_left(name, e)
            raise
        finally:
            self._account.note_purchase()
        handles = await self._handles(name, boot.nodes)
        for handle in handles:
            await self._confirm(handle, purchase)
        return handles

    async def _check_nothing_left(self, name: InstanceName, refusal: ProviderError) -> None:
        """Raise OutcomeUnknown unless a listing after `list_lag_s` proves that a refused create left no machine."""
        await asyncio.sleep(self.caps.list_lag_s)
        try:
            is_left = any(machine.handle.name == name for machine in await self._list())
        except ProviderError as e:
            raise OutcomeUnknown(f"{refusal}; whether a machine is left is unknown: {e}") from None
        if is_left:
            raise OutcomeUnknown(f"{refusal}; {self.name} still lists a machine of this name")

    async def _await_launch_interval(self, seconds: float) -> None:
        """Wait until the cloud accepts another launch."""
        if not seconds:
            return
        loop = asyncio.get_running_loop()
        async with self._turn:
            await asyncio.sleep(self._next_launch - loop.time())
            self._next_launch = loop.time() + seconds

    async def _handles(self, name: InstanceName, nodes: int) -> Sequence[Handle]:
        """Return the launched machines from the cloud's own listing, which may lag.

        Raises OutcomeUnknown if they are not listed, because a missing listing does not prove that nothing was created.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self.caps.list_lag_s + 2 * APPEAR_S
        while True:
            trouble = f"{self.name} lists too few machines"
            try:
                listed = [o for o in await self._list() if o.handle.name == name]
            except ProviderError as e:
                listed, trouble = [], str(e)
            if len(listed) >= nodes:
                return [o.handle for o in listed]
            if any(o.state is InstanceState.GONE for o in listed):
                raise NoCapacity(f"{name}: {self.name} took the machine back before it was ready")
            if loop.time() > give_up_at:
                raise OutcomeUnknown(f"{name}: launched, but {len(listed)} of {nodes} machines are listed: {trouble}")
            await asyncio.sleep(APPEAR_S)

    async def _confirm(self, handle: Handle, purchase: Purchase) -> None:
        """Confirm a launched machine; retry while the cloud throttles, which proves nothing about the machine."""
        for _ in range(CONFIRMS):
            try:
                return await self._cloud.confirm(handle, purchase)
            except Throttled as e:
                trouble = str(e)
                await asyncio.sleep(min(e.after_s, CONFIRM_S))
        raise OutcomeUnknown(f"{handle.name}: launched, but it cannot be checked: {trouble}")

    async def confirm(self, handles: Sequence[Handle], offer: Offer, boot: BootSpec) -> None:
        purchase = self._cloud.purchase(offer, boot)
        async with self._account.same():
            for handle in handles:
                await self._cloud.confirm(handle, purchase)

    async def cancel(self, name: InstanceName) -> None:
        await self._launcher.cancel(name)

    async def _list(self) -> Sequence[Observed]:
        async with self._account.same():
            return await self._cloud.list()

    async def list(self) -> Sequence[Observed]:
        machines = await self._list()
        self._listed_machines = tuple(o.handle for o in machines if o.state is not InstanceState.GONE)
        names = {handle.name for handle in self._listed_machines}
        self._watch.follow({name for name in names if attempt_of(self._installation, name) is not None})
        return [self._with_task_fault(o) for o in machines]

    def _with_task_fault(self, machine: Observed) -> Observed:
        """Return the machine with the fault of its task, if the cloud itself reports no fault."""
        fault = machine.fault or self._watch.fault(machine.handle.name)
        if not fault:
            return machine
        return replace(machine, fault=f"{self.name}: {fault}", image_refused=image_refused(fault))

    async def destroy(self, handle: Handle) -> None:
        if handle.provider != self.name or attempt_of(self._installation, handle.name) is None:
            raise Rejected(f"{handle.name} at {handle.provider} is not a machine of installation {self._installation}")
        try:
            async with self._account.same():
                await self._cloud.destroy(handle)
        finally:
            # SkyPilot's `down` ends every machine of this name, so do not call it while another machine has the name.
            if all(machine.id == handle.id for machine in self._listed_machines if machine.name == handle.name):
                self._watch.leave(handle.name)
                await self._launcher.forget(handle.name)

    async def reach(self, handle: Handle, command: Sequence[str], *, tty: bool) -> Sequence[str]:
        remote_command = reaching(command, docker_run=self._cloud.docker_run, tty=tty)
        return [*await self._launcher.ssh(handle.name, tty=tty), remote_command]

    async def check(self) -> str | None:
        try:
            await self._account.verify()
            if (wrong := await self._cloud.check()) is not None:
                return wrong
            return f"{self.name}: one {self._unknown_settings[0]}" if self._unknown_settings else None
        except ProviderError as e:
            return str(e)

    async def close(self) -> None:
        await self._watch.close()
        await self._cloud.close()
        await self._launcher.close()
