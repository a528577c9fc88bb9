"""The simulated market with faults that a test sets, for rigs that run in one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from broker.domain.errors import ProviderError
from broker.domain.ids import InstanceName
from broker.domain.instance import BootSpec, Caps, InstanceState, Observed
from broker.domain.job import Handle
from broker.domain.offer import Offer
from providers.simulated.provider import SimulatedProvider
from providers.simulated.virtual_backend import VirtualBackend

DeathShown = Literal["gone", "stopped", "omitted"]
"""State in which listings show a preempted machine."""


@dataclass(kw_only=True)
class CloudFaults:
    """Departures of a cloud from the simulated market. A test may change them at any time."""

    caps: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Caps` that differ."""
    create_errors: list[ProviderError | None] = field(default_factory=list)
    """Errors of the next creates, in their order; None: that create succeeds."""
    create_error_s: float = 0.0
    """Seconds that a create takes before it fails."""
    list_error: ProviderError | None = None
    """Error of every listing; None: listings succeed."""
    ignores_destroys: bool = False
    """True: destroys have no effect, and listings repeat the latest answer."""
    shown: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Fields of `Observed`, by machine id, that listings show instead of the truth."""
    death_shown: DeathShown = "gone"
    """State in which listings show a machine after `SimulatedCloud.preempt`."""


class SimulatedCloud(SimulatedProvider):
    """Provider of virtual machines. `faults`: its differences from `SimulatedProvider`."""

    def __init__(self, *args: Any, faults: CloudFaults | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.faults = faults or CloudFaults()
        self.calls: list[tuple[str, str]] = []
        """(call, instance name; of a destroy the machine id) of all calls that change something."""
        self.listings = 0
        """Listings that have been answered."""
        self.extra: dict[str, Observed] = {}
        """Machines on which no agent runs, by id: all but the first of a purchase of several."""
        self.died_at: dict[str, float] = {}
        """Monotonic seconds of each preemption, by instance name."""
        self._death_shown_at: dict[str, float] = {}
        self._latest: Sequence[Observed] = ()

    @property
    def backend(self) -> VirtualBackend:
        assert isinstance(self._backend, VirtualBackend)
        return self._backend

    @property
    def created(self) -> list[str]:
        """Return instance names of all creates."""
        return [name for call, name in self.calls if call == "create"]

    @property
    def caps(self) -> Caps:
        return replace(super().caps, **self.faults.caps)

    async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        self.calls.append(("create", name))
        error = self.faults.create_errors.pop(0) if self.faults.create_errors else None
        if error is not None:
            await self._clock.sleep(self.faults.create_error_s)
            raise error
        return await self.sell(name, offer, boot)

    async def sell(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        """Carry out a create that does not fail."""
        return await super().create(name, offer, boot)

    def add_machine(self, first: Handle, node: int, **facts: Any) -> Handle:
        """Add machine number `node` of a purchase, on which no agent runs, and return its handle."""
        handle = replace(first, id=f"{first.name}-{node}") if node else first
        self.extra[handle.id] = Observed(handle=handle, state=InstanceState.RUNNING, **facts)
        return handle

    def preempt(self, name: str, *, after_s: float, shown_after_s: float = 0.0) -> None:
        """Take a machine away without notice. Listings call it running for `shown_after_s` more seconds."""
        machine = self.backend._instances[InstanceName(name)]
        machine.dies_at = self.died_at[name] = self._clock.monotonic() + after_s
        self._death_shown_at[name] = machine.dies_at + shown_after_s

    async def list(self) -> Sequence[Observed]:
        if self.faults.list_error is not None:
            raise self.faults.list_error
        if not self.faults.ignores_destroys:
            machines = [*await super().list(), *self.extra.values()]
            self._latest = [shown for machine in machines if (shown := self.as_listed(machine)) is not None]
        self.listings += 1
        return self._latest

    def as_listed(self, machine: Observed) -> Observed | None:
        """Return a machine as listings show it; None: listings leave it out."""
        if machine.state is InstanceState.GONE and machine.handle.name in self.died_at:
            return self._preempted_as_listed(machine)
        return replace(machine, **self.faults.shown.get(machine.handle.id, {}))

    def _preempted_as_listed(self, machine: Observed) -> Observed | None:
        if self._clock.monotonic() < self._death_shown_at[machine.handle.name]:
            return replace(machine, state=InstanceState.RUNNING)
        if self.faults.death_shown == "omitted":
            return None
        return replace(machine, state=InstanceState(self.faults.death_shown))

    async def destroy(self, handle: Handle) -> None:
        self.calls.append(("destroy", handle.id))
        if self.faults.ignores_destroys:
            return
        self.faults.shown.pop(handle.id, None)
        if self.extra.pop(handle.id, None) is None:
            await super().destroy(handle)
