"""What brokers of one installation see of each other: that one lives, on which database, and whether it has the same
clouds.

Each may come to any row, so each must be able to ask about any machine. One that lacks a cloud would leave what runs
there uncharged while the others are down, and one whose `local` is another computer would call its machines gone. One
on a copy of the database would take the other's machines for its own, or for orphans.
"""

import hashlib
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from broker.domain.errors import BlobsUnavailable, GpubrokerError
from broker.ports import Blobs, Clock, Provider
from trainer.contract import object_keys as keys
from trainer.contract.documents import Lease

log = logging.getLogger(__name__)

LOOK_S = 5.0


class OtherBroker(GpubrokerError):
    """A broker lives that has other clouds than this one, or another database."""


@dataclass(frozen=True, kw_only=True)
class BrokerIdentity:
    """A broker's own, as its lease tells it. `clouds`: names of providers; with whose machines they are where those are
    processes of one computer, else with nothing. `database`: which one; empty where that is not known.
    """

    home: str = ""
    clouds: Mapping[str, str] = field(default_factory=dict)
    database: str = ""


def seat_of(home: Path, providers: Mapping[str, Provider], database: str) -> BrokerIdentity:
    """The lease is read by every machine: it has no name of a computer, a folder or a server in it."""
    place = _mark(f"{socket.gethostname()}\n{home.resolve()}")
    here = {name: place if provider.caps.reaches_local_files else "" for name, provider in providers.items()}
    return BrokerIdentity(home=place, clouds=here, database=_mark(database) if database else "")


def _mark(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]


async def refuse_conflicting_brokers(blobs: Blobs, clock: Clock, own: BrokerIdentity) -> None:
    """Raises OtherBroker where a broker from another home, with other clouds or another database, touches its lease
    within two rounds.

    Waits only where the lease that lies there is such a one's, and by the rhythm that it tells: this one's own may be
    another. A store that is away tells nothing, and keeps nobody.
    """
    try:
        other = _parsed(await blobs.get(keys.BROKER_LEASE))
        if other is None or other.home in ("", own.home) or (why := _difference(other, own)) is None:
            return
        watch_s = _two_rounds_s(other)
        log.warning("broker %s %s; looking for %g s whether it lives", other.broker, why, watch_s)
        if not await lease_is_renewed(blobs, clock, watch_s):
            return
    except BlobsUnavailable as e:
        log.warning("whether another broker lives that this one must not run beside cannot be told: %s", e)
        return
    raise OtherBroker(f"broker {other.broker} lives, and {why}")


async def lease_is_renewed(blobs: Blobs, clock: Clock, watch_s: float) -> bool:
    """Whether some broker lives: watched for `watch_s`, and for two rounds by the rhythm that the lease tells at the
    least. Raises BlobsUnavailable.
    """
    first = await blobs.get(keys.BROKER_LEASE)
    if (lease := _parsed(first)) is not None:
        watch_s = max(watch_s, _two_rounds_s(lease))
    until = clock.monotonic() + watch_s
    while clock.monotonic() < until:
        await clock.sleep(min(LOOK_S, watch_s))
        if await blobs.get(keys.BROKER_LEASE) != first:
            return True
    return False


def _two_rounds_s(lease: Lease) -> float:
    return 2 * lease.every_s + LOOK_S


def _parsed(lease: bytes | None) -> Lease | None:
    try:
        return Lease.model_validate_json(lease or b"")
    except ValidationError:
        return None


def _difference(other: Lease, own: BrokerIdentity) -> str | None:
    """Why the two must not run beside each other; None: they may."""
    theirs, ours = other.clouds, own.clouds
    if other.database and own.database and other.database != own.database:
        return "works on another database, of which this one is a copy or the other way round; stop it first"
    if apart := sorted(theirs.keys() ^ ours.keys()):
        who = "has" if apart[0] in theirs else "lacks"
        return f"{who} the provider {apart[0]!r}; stop it, or give both the same providers"
    place = next((name for name, mark in ours.items() if theirs[name] != mark), None)
    if place is None:
        return None
    return f"has {place!r} on another computer or home; stop it, or set providers.{place} to null in both"
