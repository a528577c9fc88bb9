"""Proofs from listings that machines are absent: pure functions and their one result, `AbsenceProof`.

A listing may lag behind the cloud, and a single listing may omit an existing machine. So absence has levels, and each
decision needs one of them: see the table "Absence proofs" in docs/design/lifecycle.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from broker.controllers.observation.listing import Listing
from broker.domain.ids import InstanceName

MISSING_S = 3.0
"""Seconds that the listings of the level "missing for seconds" span."""


@dataclass(frozen=True, kw_only=True)
class AbsenceProof:
    """Levels of absence that the listings prove for the machines of one name.

    Each level has its own condition, so a higher level does not imply a lower level.
    """

    missing_for_seconds: bool = False
    """True if the listings of the last seconds omit all machines, which existed before them."""
    proven_at: datetime | None = None
    """Latest time at which a machine may have existed; None: the absence of all machines is not proven."""
    lost: frozenset[str] = frozenset()
    """Ids of recorded machines whose absence is proven one by one."""

    @property
    def proven(self) -> bool:
        """True if no machine exists, and no earlier create will produce a machine."""
        return self.proven_at is not None


def trailing_without(listings: Sequence[Listing], shows: Callable[[Listing], bool], since: float) -> list[Listing]:
    """Return the listings, all begun after `since`, that follow the last listing that shows the machines."""
    without: list[Listing] = []
    for listing in listings:
        if listing.begun > since:
            without = [] if shows(listing) else [*without, listing]
    return without


def proof_listing(without: Sequence[Listing], lag_s: float, born: float) -> Listing | None:
    """Return the listing up to whose answer the machines may have existed; None: their absence is not proven.

    `without`: listings in a row that omit the machines. Two of them must have begun at least `lag_s` after the first;
    without lag the first is one of the two. Earlier listings may lag, and a single one may omit an existing machine.
    `born`: monotonic time at which all machines existed. Listings within a lag after `born` may omit a young machine.
    """
    if len(without) < 2 or without[-2].begun - without[0].begun < lag_s:
        return None
    grown = [listing for listing in without if listing.begun - born >= lag_s]
    return grown[1]


def missing_for_seconds(listings: Sequence[Listing], name: InstanceName, grown: float) -> bool:
    """Return True if the listings of the last `MISSING_S` seconds omit a name, each begun after `grown`.

    `grown`: monotonic time by which listings show a machine that existed when this process began to watch it. So no
    listing precedes the creation of the machine. A machine may still be created later.
    """
    without: list[Listing] = []
    for listing in listings:
        without = [] if listing.begun <= grown or listing.shows(name) else [*without, listing]
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
