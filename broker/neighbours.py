"""What brokers on one database see of each other: that one lives, and whether it has the same clouds.

Each may come to any row, so each must be able to ask about any machine. One that lacks a cloud would leave what runs
there uncharged while the others are down, and one whose `local` is another computer would call its machines gone.
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
from trainer.contract import keys
from trainer.contract.rendezvous import Lease

log = logging.getLogger(__name__)

LOOK_S = 5.0


class OtherClouds(GpubrokerError):
    """A broker lives on this database that has other clouds than this one."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A broker's own, as its lease tells it. `clouds`: names of providers; with whose machines they are where those are
    processes of one computer, else with nothing."""

    home: str = ""
    clouds: Mapping[str, str] = field(default_factory=dict)


def seat_of(home: Path, providers: Mapping[str, Provider]) -> Seat:
    """The lease is read by every machine: it has no name of a computer or a folder in it."""
    place = hashlib.sha256(f"{socket.gethostname()}\n{home.resolve()}".encode()).hexdigest()[:16]
    here = {name: place if provider.caps.reaches_local_files else "" for name, provider in providers.items()}
    return Seat(home=place, clouds=here)


async def refuse_other_clouds(blobs: Blobs, clock: Clock, own: Seat) -> None:
    """Raises OtherClouds where a broker from another home, with other clouds, touches its lease within two rounds.

    Waits only where the lease that lies there is such a one's, and by the rhythm that it tells: this one's own may be
    another. A store that is away tells nothing, and keeps nobody.
    """
    try:
        other = _parsed(await blobs.get(keys.BROKER_LEASE))
        if other is None or other.home in ("", own.home) or dict(other.clouds) == dict(own.clouds):
            return
        watch_s = _two_rounds_s(other)
        log.warning(
            "broker %s had other clouds than this one; looking for %g s whether it lives", other.broker, watch_s
        )
        if not await lease_moves(blobs, clock, watch_s):
            return
    except BlobsUnavailable as e:
        log.warning("whether another broker with other clouds lives cannot be told: %s", e)
        return
    raise OtherClouds(f"broker {other.broker} on this database {_difference(other.clouds, own.clouds)}")


async def lease_moves(blobs: Blobs, clock: Clock, watch_s: float) -> bool:
    """Whether some broker lives: watched for `watch_s`, and for two rounds by the rhythm that the lease tells at the
    least. Raises BlobsUnavailable."""
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


def _difference(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    apart = sorted(theirs.keys() ^ ours.keys())
    if apart:
        who = "has" if apart[0] in theirs else "lacks"
        return f"{who} the provider {apart[0]!r}; stop it, or give both the same providers"
    place = next(name for name, mark in ours.items() if theirs[name] != mark)
    return f"has {place!r} on another computer or home; stop it, or set providers.{place} to null in both"
