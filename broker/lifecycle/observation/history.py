"""History of listed names and machines, which outlives the listings themselves.

`broker.controllers.observation.inventory` records each listing here. Charges are computed from the result. Times are
monotonic unless noted.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from broker.billing.prices import MachineSpan
from broker.domain.ids import InstanceName
from broker.domain.instance import InstanceState, Observed
from broker.lifecycle.observation.listing import ClockReading, Listing

CLOUD_CLOCK = timedelta(seconds=60)
"""Time by which a cloud's clock may be ahead."""
MAX_TIMES = 20_000
"""Number of listings whose times are remembered: those of half a day or more."""


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
    """Number of consecutive listings, up to the latest, that do not show the machine."""
    gone: datetime | None = None
    """Answer of the listing that lists the machine as gone, or of the second consecutive listing without it; None:
    neither.
    """

    def record(self, machine: Observed | None, answered_at: datetime) -> None:
        """Record the latest listing. `machine`: its row of this machine; None: there is none."""
        if machine is not None and machine.state is not InstanceState.GONE:
            self.without, self.gone, self.last = 0, None, answered_at
            return
        self.without += 1
        if self.gone is None and (machine is not None or self.without > 1):
            self.gone = answered_at


@dataclass(kw_only=True)
class NameHistory:
    """History of one name, from its first listing or from the first question about it."""

    born_by: datetime | None
    """Database time at which all machines existed; None: unknown."""
    listable_from: float
    """Listings that began before this time may omit a machine because it is young."""
    missing_from: float = math.inf
    """Start of the first listing in the current run of listings without the name; infinity: the name is shown."""
    missing_twice_at: float | None = None
    """Answer of the second listing in this run; None: the run has fewer than two."""
    gap_s: float = 0.0
    """Longest time, in this run, from the start of a listing to the answer of the next but one.

    A machine that exists for longer is shown, because two consecutive listings would otherwise have to omit it.
    """
    machines: dict[str, ListedMachine] = field(default_factory=dict)
    """All machines that were ever shown, by their ids."""

    def record(self, listings: Sequence[Listing], name: InstanceName) -> None:
        """Record the last of these listings."""
        if not listings or listings[-1].shows(name):
            self.missing_from, self.missing_twice_at, self.gap_s = math.inf, None, 0.0
        elif self.missing_twice_at is not None:
            self.gap_s = max(self.gap_s, _gap_s(listings[-3:]))
        else:
            without: list[Listing] = []
            for listing in listings:
                without = [] if listing.begun < self.listable_from or listing.shows(name) else [*without, listing]
            self.missing_from = without[0].begun if without else math.inf
            self.missing_twice_at = without[1].answered if len(without) > 1 else None
            self.gap_s = max((_gap_s(without[i : i + 3]) for i in range(len(without))), default=0.0)

    def record_never_shown(self, times: Sequence[tuple[float, float]]) -> None:
        """Record that no listing since `listable_from` has shown the name.

        `times`: start and answer of each listing.
        """
        listable = [time for time in times if time[0] >= self.listable_from]
        if len(listable) > 1:
            self.missing_from, self.missing_twice_at = listable[0][0], listable[1][1]
        gaps = (later[1] - first[0] for first, later in zip(listable, listable[2:], strict=False))
        self.gap_s = max(gaps, default=0.0)


@dataclass(kw_only=True)
class CloudHistory:
    """Histories of the names of one cloud."""

    times: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))
    """Start and answer of each listing, including listings whose machines are forgotten. If these listings showed a
    name of a live attempt, it is in `names`.
    """
    names: dict[InstanceName, NameHistory] = field(default_factory=dict)
    unowned: set[InstanceName] = field(default_factory=set)
    """Names that belonged to no live attempt at the latest call of `keep`."""

    def record(self, listings: Iterable[Listing], clock: ClockReading, lag_s: float) -> None:
        """Record the last of these listings. `lag_s`: time by which a listing may lag behind the cloud."""
        listings = [*listings]
        listing = listings[-1]
        self.times.append((listing.begun, listing.answered))
        answered_at = clock.database_time(listing.answered)
        absent_at = clock.database_time(self.times[-3][0] - lag_s) if len(self.times) > 2 else None
        for name in listing.shown:
            history = self.names.setdefault(name, NameHistory(born_by=None, listable_from=-math.inf))
            for machine in listing.existing(name):
                if machine.handle.id not in history.machines:
                    since = born_after(absent_at, machine.created_at, answered_at)
                    history.machines[machine.handle.id] = ListedMachine(
                        since=since, shown=answered_at, last=answered_at
                    )
        for name, history in self.names.items():
            history.record(listings, name)
            listed = {machine.handle.id: machine for machine in listing.by_name.get(name, ())}
            for machine_id, listed_machine in history.machines.items():
                listed_machine.record(listed.get(machine_id), answered_at)

    def follow(
        self,
        name: InstanceName,
        listings: Iterable[Listing],
        clock: ClockReading,
        lag_s: float,
        *,
        born_by: datetime | None,
        sent_at: datetime | None = None,
    ) -> NameHistory:
        """Return the history of a name. It is computed again if `born_by` differs from that of the previous call.

        `born_by`: database time at which all machines existed; None: unknown. `sent_at`: time at which the create was
        sent. A name that was never listed counts as missing in all listings since `born_by` and a lag, or `sent_at`.
        """
        history = self.names.get(name)
        if history is not None and history.born_by == born_by:
            return history
        existed_at = sent_at if born_by is None else born_by + timedelta(seconds=lag_s)
        listable_from = -math.inf if existed_at is None else clock.monotonic_time(existed_at)
        renewed = NameHistory(
            born_by=born_by, listable_from=listable_from, machines=history.machines if history else {}
        )
        if history is not None and history.missing_twice_at is not None and history.missing_from >= listable_from:
            renewed.missing_from, renewed.missing_twice_at = history.missing_from, history.missing_twice_at
        elif existed_at is not None and (history is None or history.missing_twice_at is not None):
            renewed.record_never_shown(self.times)
        renewed.record([*listings], name)
        self.names[name] = renewed
        return renewed

    def has_listed_twice(self, since: float) -> bool:
        """Return True if two listings have begun since then, so that every machine that has existed since was shown."""
        return len(self.times) > 1 and self.times[-2][0] >= since

    def machine_spans(self, name: InstanceName, known_until: datetime | None) -> Sequence[MachineSpan]:
        """Return the lifetimes of all machines that listings have shown under a name.

        `known_until`: time after which no machine is known to exist; None: the latest listing is recent.
        """
        history = self.names.get(name)
        return (
            ()
            if history is None
            else [
                MachineSpan(id=machine_id, since=listed.since, shown=listed.shown, until=listed.gone or known_until)
                for machine_id, listed in history.machines.items()
            ]
        )

    def last_listed_at(self, name: InstanceName) -> datetime | None:
        """Return the answer time of the latest listing that shows a machine of a name; None: no listing shows any."""
        history = self.names.get(name)
        return max((machine.last for machine in history.machines.values()), default=None) if history else None

    def keep(self, owned: Set[InstanceName]) -> None:
        """Forget names that no live attempt owns in two consecutive calls.

        The first call may lack a name, because `owned` may have been read before a listed machine was created.
        """
        unowned = self.names.keys() - owned
        self.names = {name: history for name, history in self.names.items() if name not in unowned & self.unowned}
        self.unowned = unowned


def born_after(absent_at: datetime | None, created_at: datetime | None, shown_at: datetime) -> datetime | None:
    """Return the latest time at which a machine that was just listed for the first time did not exist.

    The later of two limits applies: `absent_at`, and the cloud's creation time less a possible error of its clock. The
    result is at most `shown_at`. None: neither limit is known. `absent_at`: the start of the listing before the
    previous listing, less the list lag; None: there is no such listing.
    """
    created_after = None if created_at is None else created_at - CLOUD_CLOCK
    limits = [limit for limit in (absent_at, created_after) if limit is not None]
    return min(max(limits), shown_at) if limits else None


def _gap_s(listings: Sequence[Listing]) -> float:
    return listings[2].answered - listings[0].begun if len(listings) > 2 else 0.0
