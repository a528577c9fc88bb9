"""What one listing of a cloud showed, and what is left of many that are forgotten."""

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
    """On this process's monotonic clock, before the request was sent."""
    answered: float
    """What is not shown was gone by then."""
    by_name: Mapping[InstanceName, tuple[Observed, ...]]

    def shows(self, name: InstanceName) -> bool:
        """True while something under this name exists or may exist; what the cloud calls gone does not."""
        return name in self.shown

    @cached_property
    def shown(self) -> Set[InstanceName]:
        """All names that it `shows`: each is asked for many times, by many."""
        return {name for name in self.by_name if self.standing(name)}

    def standing(self, name: InstanceName) -> Sequence[Observed]:
        return [o for o in self.by_name.get(name, ()) if o.state is not InstanceState.GONE]

    def one(self, handle: Handle) -> Observed | None:
        return next((o for o in self.by_name.get(handle.name, ()) if o.handle.id == handle.id), None)

    def shows_one(self, handle: Handle) -> bool:
        found = self.one(handle)
        return found is not None and found.state is not InstanceState.GONE


@dataclass(kw_only=True)
class ListedMachine:
    """A machine, of all that listings have told of it."""

    since: datetime | None
    """When it did not stand yet, as far as is known; here and below by the house's clock as it was then."""
    shown: datetime
    """When the first listing had answered that shows it."""
    last: datetime
    """When the latest had that shows that it stands."""
    without: int = 0
    """Listings in a row up to now that do not show it."""
    gone: datetime | None = None
    """When one had answered that calls it gone, or the second in a row that leaves it out; None: neither has."""

    def heard(self, machine: Observed | None, answered: datetime) -> None:
        """`machine`: as the latest listing has it."""
        if machine is not None and machine.state is not InstanceState.GONE:
            self.without, self.gone, self.last = 0, None, answered
            return
        self.without += 1
        if self.gone is None and (machine is not None or self.without > 1):
            self.gone = answered


@dataclass(kw_only=True)
class Followed:
    """What is left of forgotten listings: of one name."""

    born_by: datetime | None
    grown: float
    """Listings that began earlier may leave it out because it is young."""
    unlisted: float = math.inf
    """When the first of those in a row began that do not show it."""
    unseen: float | None = None
    """When the second of them had answered; None: there are no two."""
    gap_s: float = 0.0
    """Of those in a row, the longest from the begin of one to the answer of the next but one: two of them have to leave
    out what stands there."""
    machines: dict[str, ListedMachine] = field(default_factory=dict)
    """By their ids, all that were shown."""

    def heard(self, kept: Sequence[Listing], name: InstanceName) -> None:
        """Of the last of these."""
        if not kept or kept[-1].shows(name):
            self.unlisted, self.unseen, self.gap_s = math.inf, None, 0.0
        elif self.unseen is not None:
            self.gap_s = max(self.gap_s, _gap_s(kept[-3:]))
        else:
            without: list[Listing] = []
            for listing in kept:
                without = [] if listing.begun < self.grown or listing.shows(name) else [*without, listing]
            self.unlisted = without[0].begun if without else math.inf
            self.unseen = without[1].answered if len(without) > 1 else None
            self.gap_s = max((_gap_s(without[i : i + 3]) for i in range(len(without))), default=0.0)


def _gap_s(listings: Sequence[Listing]) -> float:
    return listings[2].answered - listings[0].begun if len(listings) > 2 else 0.0
