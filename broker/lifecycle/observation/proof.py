"""Proofs from listings that machines are absent: `prove_absence` and its result, `AbsenceProof`.

A listing may lag behind the cloud, and a single listing may omit an existing machine. So absence has levels, and each
decision names the level that it needs: see the table "Absence proofs" in docs/design/lifecycle.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from broker.domain.ids import InstanceName
from broker.domain.job import Handle
from broker.lifecycle.observation.listing import ClockReading, Listing

MISSING_S = 3.0
"""Seconds that the listings of the level "missing for seconds" span."""


@dataclass(frozen=True, kw_only=True)
class AbsenceFacts:
    """Listings of one cloud, and what is known about the machines of one name."""

    listings: Sequence[Listing]
    clock: ClockReading
    lag_s: float
    """Seconds by which a listing may lag behind the cloud."""
    name: InstanceName
    nodes: int
    """Number of machines that were bought under the name."""
    since: float | None
    """Monotonic time from which no machine of the name can be created any more, or from which existing machines were
    watched; None: unknown, so that only the level "missing once" can hold.
    """
    born_by: datetime | None = None
    """Database time at which all machines existed; None: unknown, so `since` is used."""
    missing_twice_at: datetime | None = None
    """Time of the answer of the second consecutive listing without machines that existed at `born_by`; None: none."""
    handles: Sequence[Handle] = ()
    """Machines whose absence is proven one by one."""


@dataclass(frozen=True, kw_only=True)
class AbsenceProof:
    """Levels of absence that the listings prove for the machines of one name.

    Each level has its own condition, so a higher level does not imply a lower level.
    """

    missing_once: bool = False
    """True if the latest listing omits a machine that the previous one shows. The machine may still exist."""
    missing_for_seconds: bool = False
    """True if the listings of the last `MISSING_S` seconds omit all machines, and the machines existed before them."""
    proven_at: datetime | None = None
    """Latest time at which a machine may have existed; None: the absence of all machines is not proven.

    Listings count only if they began at least a lag after the creation of the machines, because earlier listings may
    omit a young machine. The time is the answer of the second of them, or `missing_twice_at` if earlier.
    """
    lost: frozenset[str] = frozenset()
    """Ids of recorded machines whose absence is proven one by one."""

    @property
    def proven(self) -> bool:
        """True if no machine exists, and no earlier create will produce a machine."""
        return self.proven_at is not None


def prove_absence(facts: AbsenceFacts) -> AbsenceProof:
    """Return the levels of absence that the facts prove."""
    once = missing_once(facts.listings, facts.name, facts.nodes)
    if facts.since is None:
        return AbsenceProof(missing_once=once)
    return AbsenceProof(
        missing_once=once,
        missing_for_seconds=missing_for_seconds(facts.listings, facts.name, facts.since + facts.lag_s),
        proven_at=_proven_at(facts, facts.since),
        lost=_proven_absent(facts, facts.since),
    )


def _proven_at(facts: AbsenceFacts, since: float) -> datetime | None:
    born_at = since if facts.born_by is None else min(since, facts.clock.monotonic_time(facts.born_by))
    listing = proof_listing(facts.listings, lambda listed: listed.shows(facts.name), since, facts.lag_s, born_at)
    if listing is None:
        return None
    proven_at = facts.clock.database_time(listing.answered)
    return proven_at if facts.missing_twice_at is None else min(proven_at, facts.missing_twice_at)


def _proven_absent(facts: AbsenceFacts, since: float) -> frozenset[str]:
    """Return the ids of the machines whose absence is proven one by one."""

    def is_absent(handle: Handle) -> bool:
        shows = lambda listed: listed.shows_machine(handle)  # noqa: E731
        return proof_listing(facts.listings, shows, since, facts.lag_s, since) is not None

    return frozenset(handle.id for handle in facts.handles if is_absent(handle))


def proof_listing(
    listings: Sequence[Listing], shows: Callable[[Listing], bool], since: float, lag_s: float, born_at: float
) -> Listing | None:
    """Return the listing up to whose answer the machines may have existed; None: their absence is not proven.

    Only listings count that began after `since` and follow the last one that shows the machines. Two of them must have
    begun at least `lag_s` after the first; without lag the first is one of the two. Earlier listings may lag, and a
    single one may omit an existing machine.
    `born_at`: monotonic time at which all machines existed. Listings begun within `lag_s` after it may omit a machine.
    """
    if not listings or shows(listings[-1]):
        return None
    without = _trailing_without(listings, shows, since)
    if len(without) < 2 or without[-2].begun - without[0].begun < lag_s:
        return None
    conclusive = [listing for listing in without if listing.begun - born_at >= lag_s]
    return conclusive[1] if len(conclusive) > 1 else None


def _trailing_without(listings: Sequence[Listing], shows: Callable[[Listing], bool], since: float) -> list[Listing]:
    """Return the listings, all begun after `since`, that follow the last listing that shows the machines."""
    without: list[Listing] = []
    for listing in listings:
        if listing.begun > since:
            without = [] if shows(listing) else [*without, listing]
    return without


def missing_for_seconds(listings: Sequence[Listing], name: InstanceName, listable_from: float) -> bool:
    """Return True if the listings of the last `MISSING_S` seconds omit a name, each begun after `listable_from`.

    `listable_from`: monotonic time from which listings show every machine that existed when this process began to
    watch the name. A machine may still be created later.
    """
    without: list[Listing] = []
    for listing in listings:
        without = [] if listing.begun <= listable_from or listing.shows(name) else [*without, listing]
    return len(without) >= 2 and without[-1].begun - without[0].begun >= MISSING_S


def missing_once(listings: Sequence[Listing], name: InstanceName, nodes: int) -> bool:
    """Return True if the latest listing omits a machine that the previous one shows.

    The first listing of a process has no previous one: it omits a machine if it shows fewer than `nodes`.
    """
    previous, latest = ([None, None, *listings])[-2:]
    if latest is None:
        return False
    if previous is None:
        return len(latest.by_name.get(name, ())) < nodes
    return any(latest.machine(machine.handle) is None for machine in previous.existing(name))
