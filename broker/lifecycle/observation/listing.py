"""One listing of a cloud, and the clocks by which its times are read. Used by `proof` and `history`."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

from broker.domain.ids import InstanceName
from broker.domain.instance import InstanceState, Observed
from broker.domain.job import Handle


@dataclass(frozen=True, kw_only=True)
class ClockReading:
    """One moment on both clocks of a process. It converts times of one clock to the other clock."""

    now: datetime
    """Time of the database's clock."""
    monotonic: float

    def database_time(self, moment: float) -> datetime:
        """Convert a monotonic time to a time of the database's clock."""
        return self.now - timedelta(seconds=self.monotonic - moment)

    def monotonic_time(self, moment: datetime) -> float:
        """Convert a time of the database's clock to a monotonic time."""
        return self.monotonic - (self.now - moment).total_seconds()


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Answer of a cloud to one request for all machines of the installation."""

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


def last_begun_before_run(listings: Sequence[Listing], name: InstanceName, nodes: int) -> float | None:
    """Return the start of the last listing before the machines of a name ran; None: no listing shows them running.

    Minus infinity: no listing precedes the first one that shows a machine running. A single listing that omits a
    machine after all `nodes` were shown starting is ignored, because the omitted machine may be running.
    """
    not_yet, without = -math.inf, -math.inf
    for listing in listings:
        machines = listing.by_name.get(name, ())
        if any(machine.state is not InstanceState.STARTING for machine in machines):
            return not_yet
        if len(machines) >= nodes:
            not_yet, without = listing.begun, -math.inf
        else:
            not_yet, without = (not_yet if without == -math.inf else without), listing.begun
    return None
