"""What stands behind an instance that is no cloud's: real processes of this host, or virtual ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from broker.domain.ids import InstanceName
from broker.domain.instance import BootSpec, InstanceState, Observed
from broker.domain.job import Handle


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine as it was sold; survives the daemon as `record.json`."""

    name: InstanceName
    provider: str
    region: str
    accelerator: str
    gpus: int
    spot: bool
    lifetime_s: float | None = None
    """Seconds after its start at which it is preempted; None: never."""
    notice_s: float = 0.0
    """Seconds of warning before that; 0: none."""

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
    """Machines by name. All names it is given belong to the installation."""

    async def start(self, machine: Machine, boot: BootSpec) -> Handle:
        """Starts a machine unless the name is taken; then the handle is that machine's. Raises NoCapacity, Rejected."""
        ...

    async def machines(self) -> Sequence[Observed]:
        """All that were started and not destroyed; GONE once their program ended or they were preempted."""
        ...

    def reach(self, name: InstanceName, command: Sequence[str]) -> Sequence[str]:
        """See `ports.Provider.reach`. Raises Rejected, Gone."""
        ...

    async def destroy(self, name: InstanceName) -> None:
        """Nothing of it runs when this returns. Raises Gone when there is nothing, OutcomeUnknown."""
        ...

    async def close(self) -> None:
        """Lets go; real machines go on, virtual ones end with this process."""
        ...
