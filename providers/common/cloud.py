"""A cloud in two halves: its own API tells, lists and destroys; SkyPilot, behind `Launcher`, creates.

SkyPilot's status reads its own database and cannot see what that has lost, so nothing but creation goes through it.
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
from providers.common.image_errors import image_refused
from providers.common.machine_task import MachineTask, task_of
from providers.common.offer_filter import OfferFilter
from providers.common.remote_command import reaching
from providers.common.start_watch import StartWatch

log = logging.getLogger(__name__)

EMULATED_START_S = 30.0
"""An emulator's machine starts its agent within seconds; waiting longer for one that will not is a waste of tests."""
APPEAR_S = 2.0
"""Between two listings while a launched machine is not shown yet."""
CONFIRMS, CONFIRM_S = 5, 10.0
"""How often a cloud that is asked too much is asked about a launched machine, and the longest pause between."""


@dataclass(frozen=True, kw_only=True)
class Purchase:
    """An offer in SkyPilot's words."""

    cloud: str
    """SkyPilot's name: runpod, lambda, vast, aws."""
    region: str
    zone: str | None = None
    instance_type: str
    use_spot: bool
    disk_gb: int = 100
    catalog: Mapping[str, Sequence[Mapping[str, str]]] = field(default_factory=dict)
    """Rows to be in SkyPilot's catalog before the launch, by file (`runpod/vms.csv`); a row is keyed by its columns."""
    config: Mapping[str, object] = field(default_factory=dict)
    """SkyPilot configuration of this launch alone, e.g. `{"vast": {"create_instance_kwargs": {"price": 0.2}}}`."""
    pin: Mapping[str, str] = field(default_factory=dict)
    """For the server plugin: which exact thing to buy, where SkyPilot itself would take the first that it finds."""
    network_tier: str | None = None
    apart_s: float = 0.0
    """Seconds that the cloud wants between two launches."""


class Cloud(Owned, Protocol):
    """The native half: one file a cloud."""

    @property
    def caps(self) -> Caps: ...
    @property
    def docker_run(self) -> bool:
        """True: an image cannot be the machine, so the task runs it there (`docker run`)."""
        ...

    async def rows(self, sieve: OfferFilter) -> None:
        """Puts everything that is for sale into `sieve`. Raises Rejected, Throttled, OutcomeUnknown."""
        ...

    async def list(self) -> Sequence[Observed]: ...
    async def destroy(self, handle: Handle) -> None: ...
    async def check(self) -> str | None: ...
    def purchase(self, offer: Offer, boot: BootSpec) -> Purchase: ...
    async def confirm(self, handle: Handle, purchase: Purchase) -> None:
        """After launch: what must hold of the machine beyond what `list` reads back. Raises Rejected."""
        ...

    async def close(self) -> None: ...


class Launcher(Protocol):
    """The SkyPilot half, shared by all clouds of a daemon: see `providers.skypilot.launcher`."""

    @property
    def id(self) -> str:
        """Of the API server that would carry out a launch asked for now; known before it is started."""
        ...

    async def launch(self, name: InstanceName, purchase: Purchase, task: MachineTask) -> None:
        """Returns when the task has been started on every node. Raises the broker's ProviderErrors."""
        ...

    async def liveness(self, launched_by: str, name: InstanceName) -> Liveness: ...
    async def started(self, name: InstanceName) -> bool | str:
        """True: the task runs, or has run. False: not yet, as far as can be learned. A text: it failed, and why, in
        one line without secrets. Raises the broker's ProviderErrors.
        """
        ...

    async def ssh(self, name: InstanceName, *, tty: bool) -> Sequence[str]:
        """Argv to which one word for the shell of node 0 may be appended. Raises Rejected when it knows no way."""
        ...

    async def cancel(self, name: InstanceName) -> None: ...
    async def forget(self, name: InstanceName) -> None:
        """Housekeeping once the cloud says absent: SkyPilot's own record of the cluster. Never raises."""
        ...

    async def close(self) -> None:
        """Lets go; launches under way go on. The clouds share it, so it is closed more than once."""
        ...


class CloudProvider:
    """`ports.Provider` of one rented cloud."""

    def __init__(
        self, cloud: Cloud, launcher: Launcher, account: Account, *, installation: Installation, emulated: bool = False
    ) -> None:
        """`emulated`: the endpoints are an emulator's, so machines compute on a CPU and nothing costs money."""
        self._cloud, self._launcher, self._account = cloud, launcher, account
        self._installation = installation
        self._emulated = emulated
        self.dropped: Mapping[str, int] = {}
        self._strange: Sequence[str] = ()
        """What of the configuration the cloud did not know when it was asked for offers."""
        self._watch = StartWatch(launcher.started)
        self._turn = asyncio.Lock()
        self._next_launch = 0.0
        self._standing: Sequence[Handle] = ()
        """What the latest listing showed and did not call gone."""

    @property
    def name(self) -> str:
        return self._cloud.name

    @property
    def caps(self) -> Caps:
        caps = self._cloud.caps
        if not self._emulated:
            return caps
        return replace(caps, simulated=True, agent_start_s=min(caps.agent_start_s or 0.0, EMULATED_START_S))

    async def offers(self, ask: GpuAsk) -> Sequence[Offer]:
        await self._account.verify()  # where nothing could be listed, nothing is sold
        sieve = OfferFilter(ask)
        await self._cloud.rows(sieve)
        self.dropped = sieve.dropped
        self._ask_back(sieve.strange)
        if not self._emulated:
            return sieve.offers
        return [replace(offer, emulated_on="cpu", simulated=True) for offer in sieve.offers]

    def _ask_back(self, strange: Sequence[str]) -> None:
        for line in strange:
            if line not in self._strange:
                log.warning("%s: %s", self.name, line)
        self._strange = strange

    def launcher_id(self) -> str:
        return self._launcher.id

    async def launcher(self, launched_by: str, name: InstanceName) -> Liveness:
        return await self._launcher.liveness(launched_by, name)

    async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        if attempt_of(self._installation, name) is None:
            raise Rejected(f"{name} is not a name of installation {self._installation}")
        if boot.nodes > 1 and not self.caps.multi_node:
            raise Rejected(f"{self.name} joins no machines to one job; ask for 1 node")
        if any(seen.handle.name == name for seen in await self._seen()):
            # SkyPilot adopts by name, but sets up again what may be running, and loops for ever on a partial set.
            raise OutcomeUnknown(f"{name} stands at {self.name} already; it is not launched again")
        purchase = self._cloud.purchase(offer, boot)
        await self._apart(purchase.apart_s)
        try:
            await self._launcher.launch(name, purchase, task_of(boot, docker_run=self._cloud.docker_run))
        finally:
            self._account.note_purchase()
        handles = await self._handles(name, boot.nodes)
        for handle in handles:
            await self._confirm(handle, purchase)
        return handles

    async def _apart(self, seconds: float) -> None:
        """Waits until the cloud takes another launch."""
        if not seconds:
            return
        loop = asyncio.get_running_loop()
        async with self._turn:
            await asyncio.sleep(self._next_launch - loop.time())
            self._next_launch = loop.time() + seconds

    async def _handles(self, name: InstanceName, nodes: int) -> Sequence[Handle]:
        """The launched machines as the cloud itself lists them, which may lag.

        A cloud that does not list them, whatever it says, has not said that nothing was created.
        """
        loop = asyncio.get_running_loop()
        patience = loop.time() + self.caps.list_lag_s + 2 * APPEAR_S
        while True:
            said = f"{self.name} lists too few machines"
            try:
                seen = [o for o in await self._seen() if o.handle.name == name]
            except ProviderError as e:
                seen, said = [], str(e)
            if len(seen) >= nodes:
                return [o.handle for o in seen]
            if any(o.state is InstanceState.GONE for o in seen):
                raise NoCapacity(f"{name}: {self.name} took the machine back before it was ready")
            if loop.time() > patience:
                raise OutcomeUnknown(f"{name}: launched, but {len(seen)} of {nodes} machines are seen: {said}")
            await asyncio.sleep(APPEAR_S)

    async def _confirm(self, handle: Handle, purchase: Purchase) -> None:
        """A cloud that is asked too much says nothing against the machine, which stands."""
        for _ in range(CONFIRMS):
            try:
                return await self._cloud.confirm(handle, purchase)
            except Throttled as e:
                said = str(e)
                await asyncio.sleep(min(e.after_s, CONFIRM_S))
        raise OutcomeUnknown(f"{handle.name}: launched, but it cannot be looked at: {said}")

    async def confirm(self, handles: Sequence[Handle], offer: Offer, boot: BootSpec) -> None:
        purchase = self._cloud.purchase(offer, boot)
        async with self._account.same():
            for handle in handles:
                await self._cloud.confirm(handle, purchase)

    async def cancel(self, name: InstanceName) -> None:
        await self._launcher.cancel(name)

    async def _seen(self) -> Sequence[Observed]:
        async with self._account.same():
            return await self._cloud.list()

    async def list(self) -> Sequence[Observed]:
        seen = await self._seen()
        self._standing = tuple(o.handle for o in seen if o.state is not InstanceState.GONE)
        names = {handle.name for handle in self._standing}
        self._watch.follow({name for name in names if attempt_of(self._installation, name) is not None})
        return [self._judged(o) for o in seen]

    def _judged(self, machine: Observed) -> Observed:
        """With what was heard of its task, where the cloud itself has not said already why that will never run."""
        heard = machine.fault or self._watch.fault(machine.handle.name)
        if not heard:
            return machine
        return replace(machine, fault=f"{self.name}: {heard}", image_refused=image_refused(heard))

    async def destroy(self, handle: Handle) -> None:
        if handle.provider != self.name or attempt_of(self._installation, handle.name) is None:
            raise Rejected(f"{handle.name} at {handle.provider} is not a machine of installation {self._installation}")
        try:
            async with self._account.same():
                await self._cloud.destroy(handle)
        finally:
            # SkyPilot's `down` ends whatever has the name: another machine that stands under it must not go with this.
            if all(one.id == handle.id for one in self._standing if one.name == handle.name):
                self._watch.leave(handle.name)
                await self._launcher.forget(handle.name)

    async def reach(self, handle: Handle, command: Sequence[str], *, tty: bool) -> Sequence[str]:
        wanted = reaching(command, docker_run=self._cloud.docker_run, tty=tty)
        return [*await self._launcher.ssh(handle.name, tty=tty), wanted]

    async def check(self) -> str | None:
        try:
            await self._account.verify()
            if (wrong := await self._cloud.check()) is not None:
                return wrong
            return f"{self.name}: one {self._strange[0]}" if self._strange else None
        except ProviderError as e:
            return str(e)

    async def close(self) -> None:
        await self._watch.close()
        await self._cloud.close()
        await self._launcher.close()
