"""One listing of a cloud, and the history of listed machines that outlives the listings themselves."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property

from broker.domain.ids import InstanceName
from broker.domain.instance import InstanceState, Observed
from broker.domain.job import Handle


@dataclass(frozen=True, kw_only=True)
class Listing:
    begun: float
    """Time on this process's monotonic clock, before the request was sent."""
    answered: float
    """Time of the answer, on the same clock. A machine that is not shown had gone before it."""
    by_name: Mapping[InstanceName, tuple[Observed, ...]]

    def shows(self, name: InstanceName) -> bool:
        """Return True if a machine of this name exists or may exist. A machine that is listed as gone does not."""
        return name in self.shown

    @cached_property
    def shown(self) -> Set[InstanceName]:
        """All names for which `shows` is true. Cached, because many callers ask for many names."""
        return {name for name in self.by_name if self.existing(name)}

    def existing(self, name: InstanceName) -> Sequence[Observed]:
        """Return the machines of a name that the cloud does not list as gone."""
        return [machine for machine in self.by_name.get(name, ()) if machine.state is not InstanceState.GONE]

    def machine(self, handle: Handle) -> Observed | None:
        """Return one machine, gone or not; None: it is not listed."""
        return next((machine for machine in self.by_name.get(handle.name, ()) if machine.handle.id == handle.id), None)

    def shows_machine(self, handle: Handle) -> bool:
        machine = self.machine(handle)
        return machine is not None and machine.state is not InstanceState.GONE


@dataclass(kw_only=True)
class ListedMachine:
    """History of one machine. Times are of the database clock, as it was when they were recorded."""

    since: datetime | None
    """Latest time at which the machine is known not to have existed; None: unknown."""
    shown: datetime
    """Answer of the first listing that showed the machine."""
    last: datetime
    """Answer of the latest listing that showed the machine as existing."""
    without: int = 0
    """Number of listings in a row, up to now, that do not show the machine."""
    gone: datetime | None = None
    """Answer of the listing that lists the machine as gone, or of the second in a row that omits it; None: neither."""

    def record(self, machine: Observed | None, answered: datetime) -> None:
        """Record the latest listing. `machine`: its row of this machine; None: there is none."""
        if machine is not None and machine.state is not InstanceState.GONE:
            self.without, self.gone, self.last = 0, None, answered
            return
        self.without += 1
        if self.gone is None and (machine is not None or self.without > 1):
            self.gone = answered


@dataclass(kw_only=True)
class Followed:
    """History of one name, kept after the listings themselves are forgotten. Times are monotonic unless noted."""

    born_by: datetime | None
    """Database time at which all machines existed; None: unknown."""
    grown: float
    """Listings that began before this time may omit a machine because it is young."""
    unlisted: float = math.inf
    """Begin of the first of the listings in a row, up to now, that do not show the name; infinity: it is shown."""
    unseen: float | None = None
    """Answer of the second of these listings; None: there are fewer than two."""
    gap_s: float = 0.0
    """Longest time from the begin of one of these listings to the answer of the next but one.

    A machine that exists for longer is shown, since two listings in a row would have to omit it.
    """
    machines: dict[str, ListedMachine] = field(default_factory=dict)
    """All machines that were ever shown, by their ids."""

    def record(self, listings: Sequence[Listing], name: InstanceName) -> None:
        """Record the last of these listings."""
        if not listings or listings[-1].shows(name):
            self.unlisted, self.unseen, self.gap_s = math.inf, None, 0.0
        elif self.unseen is not None:
            self.gap_s = max(self.gap_s, _gap_s(listings[-3:]))
        else:
            without: list[Listing] = []
            for listing in listings:
                without = [] if listing.begun < self.grown or listing.shows(name) else [*without, listing]
            self.unlisted = without[0].begun if without else math.inf
            self.unseen = without[1].answered if len(without) > 1 else None
            self.gap_s = max((_gap_s(without[i : i + 3]) for i in range(len(without))), default=0.0)


def _gap_s(listings: Sequence[Listing]) -> float:
    return listings[2].answered - listings[0].begun if len(listings) > 2 else 0.0
