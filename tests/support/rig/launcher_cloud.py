"""A cloud behind a launcher that sets machines up, as SkyPilot does: no agent runs until the launcher is done."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from broker.domain.errors import OutcomeUnknown, ProviderError
from broker.domain.ids import InstanceName, JobId, attempt_id, attempt_of, instance_name
from broker.domain.instance import BootSpec, Caps, InstanceState, Liveness
from broker.domain.job import Handle
from broker.domain.offer import Offer
from providers.simulated.provider import SimulatedProvider
from tests.support.rig.broker_rig import INSTALLATION, BrokerRig
from tests.support.rig.simulated_cloud import SimulatedCloud
from trainer.contract import object_keys as keys
from trainer.contract.documents import Heartbeat, Phase

LAUNCHER_CAPS: dict[str, Any] = {
    "agent_start_s": 60.0, "boot_deadline_s": 300.0, "trust": "secure", "multi_node": True,
}  # fmt: skip


class LauncherCloud(SimulatedCloud):
    """Cloud that lists and bills machines from the create on. A launch continues when its caller has ended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.setup_allowed = asyncio.Event()
        """Set: launches start the agents of their machines."""
        self.launches: dict[InstanceName, asyncio.Task[Sequence[Handle]]] = {}
        self.creates_hang = False
        """True: creates do not return, with any outcome of the launch."""
        self.lost_cancels = 0
        """Number of the next cancels that the launcher does not receive."""
        self.confirm_errors: list[ProviderError] = []
        """Errors of the next confirms, in their order."""
        self.beats = 0
        """Heartbeats of machines other than the first of a purchase."""

    @property
    def caps(self) -> Caps:
        return replace(super().caps, **LAUNCHER_CAPS | dict(self.faults.caps))

    async def sell(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        first = Handle(provider=self.name, id=name, name=name, region=offer.region)
        for node in range(boot.nodes):
            self.add_machine(first, node)
        launch = self.launches[name] = asyncio.create_task(self._launch(name, offer, boot))
        await asyncio.wait([launch])
        if self.creates_hang:
            await asyncio.Event().wait()
        if launch.cancelled():
            raise OutcomeUnknown(f"the launcher of {name} died")
        return launch.result()

    async def _launch(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        await self.setup_allowed.wait()
        await super().sell(name, offer, replace(boot, nodes=1))
        for node in range(1, boot.nodes):
            await self.beat(name, node)
        self.extra.pop(name, None)
        return [o.handle for o in await self.list() if o.handle.name == name]

    async def beat(self, name: InstanceName, node: int, phase: Phase = "training") -> None:
        """Send a heartbeat of machine number `node`, on which no agent runs here."""
        attempt = attempt_of(INSTALLATION, name)
        assert attempt is not None
        self.beats += 1
        beat = Heartbeat(attempt=attempt, node=node, boot="b", seq=self.beats, phase=phase)
        await self.backend._blobs.put(keys.heartbeat(attempt, node), beat.model_dump_json().encode())

    async def launcher(self, launched_by: str, name: InstanceName) -> Liveness:
        return Liveness.ALIVE if name in self.launches and not self.launches[name].done() else Liveness.DEAD

    def kill(self, name: InstanceName) -> None:
        self.launches[name].cancel()

    async def confirm(self, handles: Sequence[Handle], offer: Offer, boot: BootSpec) -> None:
        self.calls.append(("confirm", handles[0].name))
        if self.confirm_errors:
            raise self.confirm_errors.pop(0)

    async def cancel(self, name: InstanceName) -> None:
        self.calls.append(("cancel", name))
        if self.lost_cancels:
            self.lost_cancels -= 1
            raise OutcomeUnknown("the launcher did not hear")
        if name in self.launches:
            self.kill(name)

    async def evict(self, name: InstanceName) -> None:
        """End a machine's agent and list the machine as stopped: it is ours until it is destroyed."""
        (machine,) = [o for o in await self.list() if o.handle.id == name]
        await SimulatedProvider.destroy(self, machine.handle)
        self.extra[name] = replace(machine, state=InstanceState.STOPPED)

    async def close(self) -> None:
        for launch in self.launches.values():
            launch.cancel()
        await asyncio.gather(*self.launches.values(), return_exceptions=True)
        await super().close()


def cloud_of(rig: BrokerRig) -> LauncherCloud:
    assert isinstance(rig.provider, LauncherCloud)
    return rig.provider


def name_of(job: JobId, number: int = 1) -> InstanceName:
    return instance_name(INSTALLATION, attempt_id(job, number))


async def until_machine_recorded(rig: BrokerRig, job: JobId, number: int = 1) -> None:
    """Wait until the machine of the attempt with that number exists and its handle is recorded."""

    async def recorded() -> bool:
        attempts = await rig.attempts(job)
        return len(attempts) >= number and bool(attempts[number - 1].handles)

    await rig.eventually(recorded)
