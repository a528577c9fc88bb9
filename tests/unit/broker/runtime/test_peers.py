"""Brokers on one database must be able to ask about each other's machines."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.blobs import ObstoreBlobs
from broker.controllers.base.context import Intervals
from broker.controllers.monitoring.dead_man_switch import Deadman
from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import Installation
from broker.domain.instance import Caps
from broker.ports import Blobs, Provider
from broker.runtime.peers import (
    POLL_S,
    BrokerIdentity,
    OtherBroker,
    lease_is_renewed,
    refuse_conflicting_brokers,
    seat_of,
)
from tests.support.memory_store.store import MemoryStore
from tests.unit.providers.clocks import SteppedClock
from trainer.contract import object_keys as keys
from trainer.contract.documents import Lease

CLOUDS = {"aws": "", "local": "one"}


class Other(SteppedClock):
    """A broker that touches its lease each `every_s` while this one waits, as long as it lives."""

    def __init__(self, blobs: ObstoreBlobs, seat: BrokerIdentity, *, lives: bool, every_s: float) -> None:
        super().__init__()
        self._blobs, self._seat, self._lives, self._every_s, self._seq = blobs, seat, lives, every_s, 0
        self._due = self.monotonic() + every_s

    async def touch(self) -> None:
        self._seq += 1
        seat = self._seat
        lease = Lease(
            broker="other/1", seq=self._seq, every_s=self._every_s, home=seat.home, clouds=dict(seat.clouds),
            database=seat.database,
        )  # fmt: skip
        await self._blobs.put(keys.BROKER_LEASE, lease.model_dump_json().encode())

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        if self._lives and self.monotonic() >= self._due:
            self._due += self._every_s
            await self.touch()


async def started(own: BrokerIdentity, other: BrokerIdentity, *, lives: bool = True, every_s: float = 20.0) -> float:
    """Return the seconds for which a start waits because of another broker."""
    blobs = ObstoreBlobs.open("memory://", Installation("abcd"))
    clock = Other(blobs, other, lives=lives, every_s=every_s)
    await clock.touch()
    begun = clock.monotonic()
    await refuse_conflicting_brokers(blobs, clock, own)
    return clock.monotonic() - begun


@pytest.mark.parametrize(
    ("clouds", "words"),
    [
        ({"local": "one"}, "broker other/1 runs, and lacks the provider 'aws'"),
        ({**CLOUDS, "vast": ""}, "has the provider 'vast'; stop it, or give both the same providers"),
        (
            {"aws": "", "local": "two"},
            "has 'local' on another computer or home; stop it, or set providers.local to null",
        ),
    ],
)
async def test_a_broker_does_not_start_next_to_one_with_other_clouds(clouds: dict[str, str], words: str) -> None:
    own, broker_identity = BrokerIdentity(home="here", clouds=CLOUDS), BrokerIdentity(home="there", clouds=clouds)
    with pytest.raises(OtherBroker) as refused:
        await started(own, broker_identity)
    assert words in str(refused.value)
    assert await started(own, broker_identity, lives=False) == pytest.approx(45), "it is dead, and blocks no broker"


async def test_broker_refuses_a_database_copy_while_the_other_lives() -> None:
    """A broker does not start on a copy of the database while another broker runs on the original."""
    own, other = (BrokerIdentity(home=home, clouds=CLOUDS, database=home) for home in ("here", "there"))
    with pytest.raises(OtherBroker, match="works on another database") as refused:
        await started(own, other)
    assert "stop it first" in str(refused.value)
    await started(own, other, lives=False)
    assert await started(own, replace(other, database="here")) == 0
    assert await started(replace(own, database=""), other) == 0, "it is not known"


@pytest.mark.parametrize("every_s", [0.5, 20.0, 200.0])
async def test_a_broker_is_waited_for_by_its_own_interval(every_s: float) -> None:
    own, broker_identity = BrokerIdentity(home="here", clouds=CLOUDS), BrokerIdentity(home="there", clouds={})
    with pytest.raises(OtherBroker):
        await started(own, broker_identity, every_s=every_s)
    assert await started(own, broker_identity, lives=False, every_s=every_s) == pytest.approx(
        2 * every_s + POLL_S, abs=POLL_S
    )


async def test_a_lease_states_its_brokers_interval() -> None:
    blobs, clock = ObstoreBlobs.open("memory://", Installation("abcd")), SteppedClock()
    seat, intervals = BrokerIdentity(home="there", clouds=CLOUDS), Intervals(deadman_s=7)
    broker: Any = SimpleNamespace(
        store=MemoryStore(clock), blobs=blobs, owner="there/1", identity=seat, intervals=intervals
    )
    await Deadman(broker).step()
    lease = Lease.model_validate_json(await blobs.get(keys.BROKER_LEASE) or b"")
    assert (lease.home, lease.clouds, lease.every_s) == ("there", CLOUDS, 7)


async def test_start_waits_for_no_broker_of_the_same_clouds_or_home() -> None:
    """A start waits for no broker that has the same clouds or the same home."""
    own = BrokerIdentity(home="here", clouds=CLOUDS)
    for other in (
        BrokerIdentity(home="there", clouds=CLOUDS),
        BrokerIdentity(home="here", clouds={"runpod": ""}),
        BrokerIdentity(),
    ):
        assert await started(own, other) == 0


async def test_an_absent_store_or_a_broken_lease_delays_no_start() -> None:
    class Away:
        async def get(self, key: str, *, max_bytes: int = 0) -> bytes | None:
            raise BlobsUnavailable("no answer")

    own = BrokerIdentity(home="here", clouds=CLOUDS)
    await refuse_conflicting_brokers(cast(Blobs, Away()), SteppedClock(), own)
    blobs = ObstoreBlobs.open("memory://", Installation("abcd"))
    await blobs.put(keys.BROKER_LEASE, b"{")
    await refuse_conflicting_brokers(blobs, SteppedClock(), own)


def test_machines_that_are_processes_belong_to_the_home_that_starts_them(tmp_path: Path) -> None:
    @dataclass
    class Cloud:
        caps: Caps

    clouds: dict[str, Any] = {"aws": Cloud(Caps(spot=True)), "local": Cloud(Caps(spot=False, reaches_local_files=True))}
    one, two = (seat_of(tmp_path / name, cast(dict[str, Provider], clouds), "") for name in ("one", "two"))
    assert (one.clouds["aws"], one.clouds["local"]) == ("", one.home)
    assert one.home != two.home
    assert str(tmp_path) not in one.home


@pytest.mark.parametrize("every_s", [0.5, 60.0, 200.0])
async def test_the_lease_is_watched_for_two_rounds_at_least(every_s: float) -> None:
    """The watch takes at least two rounds of the lease. After a shorter one, a sweep without a database would destroy
    the machines of a live broker.
    """
    blobs = ObstoreBlobs.open("memory://", Installation("abcd"))
    other = Other(blobs, BrokerIdentity(home="there", clouds=CLOUDS), lives=True, every_s=every_s)
    await other.touch()
    assert await lease_is_renewed(blobs, other, 1.0)
