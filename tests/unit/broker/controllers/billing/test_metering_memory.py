"""A process that runs for months forgets ended attempts, whichever broker ended them."""

from collections.abc import Sequence, Set
from typing import cast

from broker.controllers.base.context import ControllerContext
from broker.controllers.billing.metering import Billing
from broker.controllers.observation.attempt_observer import AttemptObserver
from broker.controllers.observation.heartbeats import HeartbeatReader
from broker.controllers.observation.inventory import Inventory
from broker.domain.ids import AttemptId
from broker.ports import BlobInfo, Blobs, Leased, Provider, Store
from tests.support import build
from tests.unit.broker.controllers.observation.test_inventory import Scripted
from tests.unit.providers.clocks import SteppedClock
from trainer.contract import object_keys as keys
from trainer.contract.documents import Heartbeat

OTHER = AttemptId("b" * 13)


class Beating:
    """A blob store with the beats of two attempts."""

    async def list(self, prefix: str, *, max_per_folder: int) -> Sequence[BlobInfo]:
        return [BlobInfo(key=keys.heartbeat(of, 0), bytes=1, etag="e") for of in (build.attempt().id, OTHER)]

    async def get(self, key: str, *, max_bytes: int = 0) -> bytes:
        return Heartbeat(attempt="a", boot="b", seq=1).model_dump_json().encode()


class OneLives:
    """A store with one of the two attempts."""

    async def sent_attempts(self) -> Sequence[Leased]:
        return [Leased(attempt=build.attempt(), job=build.active_job())]

    async def charge(self, charges: object) -> None: ...


class Counting:
    kept: Set[AttemptId] = frozenset()

    def keep(self, live: Set[AttemptId]) -> None:
        self.kept = live


async def test_billing_drops_cached_heartbeats_of_ended_attempts() -> None:
    context = ControllerContext(
        installation=build.INSTALLATION, owner="test", store=cast(Store, OneLives()), blobs=cast(Blobs, Beating()),
        providers={"simulated": cast(Provider, Scripted())}, clock=SteppedClock(),
    )  # fmt: skip
    beats, told, inventory = HeartbeatReader(context), Counting(), Inventory(context)
    looker = AttemptObserver(context, inventory, beats)
    await beats.refresh()
    assert await beats.latest(OTHER) is not None
    await Billing(context, inventory, (looker, told)).step()
    assert told.kept == {build.attempt().id}
    assert await beats.latest(OTHER) is None
    assert await beats.latest(build.attempt().id) is not None
