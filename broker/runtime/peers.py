"""Checks at the start that no other live broker has other clouds or another database.

Any broker may handle any row, so each broker must be able to query any machine. A broker that lacks a cloud would leave
that cloud's machines uncharged while the other brokers are down. A broker on another computer would report the machines
of the first broker's provider `local` as gone. A broker on a copy of the database would treat the machines of the
original as its own, or as orphans.
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

POLL_S = 5.0
"""Seconds between two reads of the lease."""


class OtherBroker(GpubrokerError):
    """Raised if a live broker has other clouds than this one, or another database."""


@dataclass(frozen=True, kw_only=True)
class BrokerIdentity:
    """Identity of a broker, as its lease reports it."""

    home: str = ""
    """Hash of host name and home folder; empty: unknown."""
    clouds: Mapping[str, str] = field(default_factory=dict)
    """Value by provider: `home` if the provider's machines are processes of this computer, otherwise empty."""
    database: str = ""
    """Hash that identifies the database; empty: unknown."""


def seat_of(home: Path, providers: Mapping[str, Provider], database: str) -> BrokerIdentity:
    """Return this broker's identity as hashes, because every machine reads the lease and host names are private."""
    place = _mark(f"{socket.gethostname()}\n{home.resolve()}")
    local_places = {name: place if provider.caps.reaches_local_files else "" for name, provider in providers.items()}
    return BrokerIdentity(home=place, clouds=local_places, database=_mark(database) if database else "")


def _mark(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]


async def refuse_conflicting_brokers(blobs: Blobs, clock: Clock, own: BrokerIdentity) -> None:
    """Raise OtherBroker if a conflicting broker renews its lease within two of its intervals.

    A broker conflicts if it has another home, and also other clouds or another database. The wait lasts two of the
    intervals in that broker's lease plus `POLL_S`. Without a conflicting lease there is no wait. If the blob store is
    unreachable, the daemon logs a warning and starts.
    """
    try:
        other = _parsed(await blobs.get(keys.BROKER_LEASE))
        if other is None or other.home in ("", own.home) or (why := _difference(other, own)) is None:
            return
        watch_s = _two_intervals_s(other)
        log.warning("broker %s %s; checking for %g s whether it runs", other.broker, why, watch_s)
        if not await lease_is_renewed(blobs, clock, watch_s):
            return
    except BlobsUnavailable as e:
        log.warning("cannot check whether a conflicting broker runs: %s", e)
        return
    raise OtherBroker(f"broker {other.broker} runs, and {why}")


async def lease_is_renewed(blobs: Blobs, clock: Clock, watch_s: float) -> bool:
    """Return True if a broker renews the lease within `watch_s`, or within two of its intervals if they are longer.

    Raises BlobsUnavailable.
    """
    first = await blobs.get(keys.BROKER_LEASE)
    if (lease := _parsed(first)) is not None:
        watch_s = max(watch_s, _two_intervals_s(lease))
    until = clock.monotonic() + watch_s
    while clock.monotonic() < until:
        await clock.sleep(min(POLL_S, watch_s))
        if await blobs.get(keys.BROKER_LEASE) != first:
            return True
    return False


def _two_intervals_s(lease: Lease) -> float:
    return 2 * lease.every_s + POLL_S


def _parsed(lease: bytes | None) -> Lease | None:
    try:
        return Lease.model_validate_json(lease or b"")
    except ValidationError:
        return None


def _difference(other: Lease, own: BrokerIdentity) -> str | None:
    """Return why the two brokers must not run at the same time; None: they may."""
    other_clouds, own_clouds = other.clouds, own.clouds
    if other.database and own.database and other.database != own.database:
        return "works on another database, and one of the two is a copy; stop it first"
    if different := sorted(other_clouds.keys() ^ own_clouds.keys()):
        verb = "has" if different[0] in other_clouds else "lacks"
        return f"{verb} the provider {different[0]!r}; stop it, or give both the same providers"
    place = next((name for name, mark in own_clouds.items() if other_clouds[name] != mark), None)
    if place is None:
        return None
    return f"has {place!r} on another computer or home; stop it, or set providers.{place} to null in both"
