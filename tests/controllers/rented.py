"""A cloud behind a launcher that sets machines up, as SkyPilot does: no agent runs until the launcher is through."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from broker.domain.errors import OutcomeUnknown, ProviderError
from broker.domain.ids import InstanceName, JobId, attempt_id, attempt_of, instance_name
from broker.domain.instance import BootSpec, Caps, InstanceState, Liveness, Observed
from broker.domain.job import Handle
from broker.domain.offer import Offer
from providers.simulated.provider import SimulatedProvider
from providers.simulated.virtual_backend import VirtualBackend
from tests.controllers.house import INSTALLATION, House
from trainer.contract import object_keys as keys
from trainer.contract.documents import Heartbeat, Phase


class Rented(SimulatedProvider):
    """Machines are listed, and bill, as soon as create is called. A launch goes on when its caller has gone."""

    agent_start_s = 60.0
    deadline_s = 300.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.set_up = asyncio.Event()
        """Set: launches get through."""
        self.launches: dict[InstanceName, asyncio.Task[Sequence[Handle]]] = {}
        self.mute = False
        """True: creates do not return, whatever became of the launch."""
        self.deaf = 0
        """So many of the next cancels go unheard."""
        self.bare: dict[str, Observed] = {}
        """Machines on which no agent runs, by id: not yet, or since they are not the first of several."""
        self.shown: dict[str, dict[str, Any]] = {}
        """What listings say of a machine, by id, instead of the truth."""
        self.findings: list[ProviderError] = []
        """What the next looks at machines say whose create was not heard."""
        self.called: list[tuple[str, str]] = []
        self.listings = 0
        """That have answered."""
        self.beats = 0
        """Of machines beside the first."""

    @property
    def caps(self) -> Caps:
        return replace(
            super().caps,
            agent_start_s=self.agent_start_s,
            boot_deadline_s=self.deadline_s,
            trust="secure",
            multi_node=True,
        )

    async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        self.called.append(("create", name))
        handle = Handle(provider=self.name, id=name, name=name, region=offer.region)
        for node in range(boot.nodes):
            one = handle if not node else replace(handle, id=f"{name}-{node}")
            self.bare[one.id] = Observed(handle=one, state=InstanceState.RUNNING)
        self.launches[name] = asyncio.create_task(self._launch(name, offer, boot))
        await asyncio.wait([self.launches[name]])
        if self.mute:
            await asyncio.Event().wait()
        if self.launches[name].cancelled():
            raise OutcomeUnknown(f"the launcher of {name} died")
        return self.launches[name].result()

    async def _launch(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        await self.set_up.wait()
        await super().create(name, offer, replace(boot, nodes=1))
        for node in range(1, boot.nodes):
            await self.beat(name, node)
        self.bare.pop(name, None)
        return [o.handle for o in await self.list() if o.handle.name == name]

    async def beat(self, name: InstanceName, node: int, phase: Phase = "training") -> None:
        """The first one of a machine beside the first, which has no agent here; or one more."""
        own = attempt_of(INSTALLATION, name)
        assert own is not None
        assert isinstance(self._body, VirtualBackend)
        self.beats += 1
        beat = Heartbeat(attempt=own, node=node, boot="b", seq=self.beats, phase=phase)
        await self._body._blobs.put(keys.heartbeat(own, node), beat.model_dump_json().encode())

    async def launcher(self, launched_by: str, name: InstanceName) -> Liveness:
        return Liveness.ALIVE if name in self.launches and not self.launches[name].done() else Liveness.DEAD

    def kill(self, name: InstanceName) -> None:
        self.launches[name].cancel()

    async def confirm(self, handles: Sequence[Handle], offer: Offer, boot: BootSpec) -> None:
        self.called.append(("confirm", handles[0].name))
        if self.findings:
            raise self.findings.pop(0)

    async def cancel(self, name: InstanceName) -> None:
        self.called.append(("cancel", name))
        if self.deaf:
            self.deaf -= 1
            raise OutcomeUnknown("the launcher did not hear")
        if name in self.launches:
            self.kill(name)

    async def evict(self, name: InstanceName) -> None:
        """Its agent dies, and the cloud lists it as stopped: ours until it is destroyed."""
        (machine,) = [o for o in await super().list() if o.handle.name == name]
        await super().destroy(machine.handle)
        self.bare[name] = replace(machine, state=InstanceState.STOPPED)

    async def list(self) -> Sequence[Observed]:
        listed = [*self.bare.values(), *await super().list()]
        self.listings += 1
        return [replace(o, **self.shown.get(o.handle.id, {})) for o in listed]

    async def destroy(self, handle: Handle) -> None:
        self.called.append(("destroy", handle.id))
        self.shown.pop(handle.id, None)
        if self.bare.pop(handle.id, None) is None:
            await super().destroy(handle)

    async def close(self) -> None:
        for launch in self.launches.values():
            launch.cancel()
        await asyncio.gather(*self.launches.values(), return_exceptions=True)
        await super().close()


def cloud_of(broker: House) -> Rented:
    assert isinstance(broker.provider, Rented)
    return broker.provider


def name_of(job: JobId, number: int = 1) -> InstanceName:
    return instance_name(INSTALLATION, attempt_id(job, number))


async def standing(broker: House, job: JobId, number: int = 1) -> None:
    """Until the machine is there, bare, and has been noted."""

    async def noted() -> bool:
        attempts = await broker.attempts(job)
        return len(attempts) >= number and bool(attempts[number - 1].handles)

    await broker.eventually(noted)
