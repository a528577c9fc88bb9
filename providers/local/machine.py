"""Backend protocol for local and simulated machines: processes of this host, or machines in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from broker.domain.ids import InstanceName
from broker.domain.instance import BootSpec, InstanceState, Observed
from broker.domain.job import Handle


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Attributes of one machine at its purchase; the process backend stores them as `record.json`."""

    name: InstanceName
    provider: str
    region: str
    accelerator: str
    gpus: int
    spot: bool
    lifetime_s: float | None = None
    """Seconds from the start to the preemption; None: never preempted."""
    notice_s: float = 0.0
    """Seconds of notice before the preemption; 0: no notice."""
    job: str = ""
    """Job that runs on the machine; empty: not known."""

    @property
    def handle(self) -> Handle:
        return Handle(provider=self.provider, id=self.name, name=self.name, region=self.region)

    def observed(self, state: InstanceState, notice_s: float | None = None) -> Observed:
        return Observed(
            handle=self.handle,
            state=state,
            accelerator=self.accelerator,
            gpus=self.gpus,
            spot=self.spot,
            notice_s=notice_s,
        )


class MachineBackend(Protocol):
    """Machines by name. The caller passes only names of its installation."""

    async def start(self, machine: Machine, boot: BootSpec) -> Handle:
        """Start a machine, unless one of that name exists, and return its handle. Raises NoCapacity, Rejected."""
        ...

    async def machines(self) -> Sequence[Observed]:
        """Return all machines that were not destroyed. A machine is GONE after its agent has ended or a preemption."""
        ...

    def reach(self, name: InstanceName, command: Sequence[str]) -> Sequence[str]:
        """Return the argv of `ports.Provider.reach`. Raises Rejected, Gone."""
        ...

    async def destroy(self, name: InstanceName) -> None:
        """Return once no process of the machine runs. Raises Gone if the machine is absent, or OutcomeUnknown."""
        ...

    async def close(self) -> None:
        """Release resources. Machines of host processes keep running; virtual machines end with this process."""
        ...
