"""The gate of a simulated broker, whose listings leave out what stands there."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from broker.domain.instance import Observed
from broker.gate import Gate
from broker.ports import Clock, Provider
from tests.sim.cloud import CloudDoor

if TYPE_CHECKING:
    from tests.sim.world import World


class OmittingGate(Gate):
    """Leaves a machine out of one listing now and then, never of two in a row: that would be more than a lag.

    Of those in a row that the broker is given: the gate looks for itself whether a cloud is back, as often as it takes,
    and shows nobody what it was told then.
    """

    def __init__(self, world: "World", door: CloudDoor, clock: Clock) -> None:
        super().__init__(cast(Provider, door), clock)
        self._world, self._process = world, door.process
        self._left_out: set[str] = set()

    async def list(self) -> Sequence[Observed]:
        begun = self._world.loop.time()
        shown = await super().list()
        share = 0.5 if self._world.weather.hits("cloud.list_omits") else self._world.blinks
        omitted = {o.handle.id for o in shown if o.handle.id not in self._left_out and self._world.sometimes(share)}
        self._left_out = omitted
        left = [one for one in shown if one.handle.id not in omitted]
        self._world.watch.budgets.listed(self._process, begun, left)
        return left
