"""A broker that cannot reach a cloud leaves rows to other brokers of its database, except those that cannot wait."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from broker.controllers.base.context import ControllerContext
from broker.controllers.monitoring.liveness import LivenessController
from broker.controllers.observation.attempt_observer import AttemptObserver
from broker.controllers.observation.heartbeats import HeartbeatReader
from broker.controllers.observation.inventory import Inventory
from broker.controllers.observation.listing_poller import UNANSWERED
from broker.controllers.provisioning.creates_in_flight import CreatesInFlight
from broker.controllers.termination.destroy_queue import Destroys
from broker.controllers.termination.termination import Termination
from broker.domain.errors import OutcomeUnknown
from broker.domain.ids import Installation
from broker.domain.instance import Caps, Liveness, Observed
from broker.domain.job import AttemptState, Handle
from broker.ports import Blobs, Change, Lane, Provider
from tests.conformance.samples import HOUR, ManualClock, in_state, running
from tests.support.memory_store.store import MemoryStore


class UnansweringCloud:
    """Cloud that receives calls, but whose answers do not arrive."""

    name, caps = "simulated", Caps(spot=True)

    def __init__(self) -> None:
        self.destroyed: list[str] = []

    async def list(self) -> Sequence[Observed]:
        raise OutcomeUnknown("no connection")

    async def launcher(self, launched_by: str, name: str) -> Liveness:
        return Liveness.DEAD

    async def destroy(self, handle: Handle) -> None:
        self.destroyed.append(handle.id)
        raise OutcomeUnknown("no connection")


class CutOff:
    """A broker that has had no answer of its cloud for a while."""

    def __init__(self, store: MemoryStore) -> None:
        self.cloud = UnansweringCloud()
        self.context = ControllerContext(
            installation=Installation("abcd"), owner="cut-off", store=store, blobs=cast(Blobs, None),
            clock=ManualClock(), providers={"simulated": cast(Provider, cast(Any, self.cloud))},
        )  # fmt: skip
        self.inventory = Inventory(self.context)

    async def listens(self) -> None:
        for _ in range(UNANSWERED):
            await self.inventory.refresh_all(["simulated"])


async def test_a_working_machine_is_left_to_brokers_that_list_its_cloud() -> None:
    store = MemoryStore(ManualClock())
    broker = CutOff(store)
    attempt, _ = await running(store)
    await broker.listens()
    looker = AttemptObserver(broker.context, broker.inventory, HeartbeatReader(broker.context))
    assert not await LivenessController(broker.context, looker).step()
    (leased,) = await store.claim_attempts(
        Lane.LIVENESS, owner="hears", lease_s=HOUR, limit=9, turns={"simulated": 0.0}
    )
    assert leased.attempt.id == attempt.id


async def test_bill_end_of_an_unreachable_cloud_is_asked_at_once() -> None:
    """The broker asks for the end of a bill at once, even from a cloud that does not answer."""
    store = MemoryStore(ManualClock())
    broker = CutOff(store)
    attempt, _ = await running(store)
    (leased,) = await store.claim_attempts(Lane.LIVENESS, owner="before", lease_s=HOUR, limit=1)
    machine = Handle(provider="simulated", id="m-1", name=attempt.name)
    ending = replace(in_state(leased.attempt, AttemptState.TERMINATING), handles=(machine,))
    await store.apply([Change(attempt=(leased.attempt, ending))])
    await broker.listens()
    launchers = CreatesInFlight(broker.context)
    await Termination(broker.context, broker.inventory, launchers, Destroys(broker.context)).step()
    assert broker.cloud.destroyed == ["m-1"]
