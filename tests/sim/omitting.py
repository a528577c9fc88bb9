"""Rate limiter of a simulated broker, whose listings omit a running machine or list it as stopped."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from broker.domain.ids import InstanceName
from broker.domain.instance import InstanceState, Observed
from broker.domain.job import AttemptState
from broker.ports import Clock, Provider
from broker.runtime.provider_gate import RateLimitedProvider
from tests.sim.cloud import CloudConnection
from tests.sim.measures import attempt_of_machine
from trainer.contract import object_keys as keys

if TYPE_CHECKING:
    from tests.sim.world import World

LATE_S = 2.0
"""Seconds by which a heartbeat may be late."""


class OmittingGate(RateLimitedProvider):
    """Leaves a machine out of one listing now and then, or lists it as stopped, but never in two consecutive listings.
    Two would exceed a lag or a blink.

    Only listings for the broker count. The gate also polls by itself whether a cloud is back, and discards those
    answers.
    """

    def __init__(self, world: "World", door: CloudConnection, clock: Clock) -> None:
        super().__init__(cast(Provider, door), clock)
        self._world, self._process = world, door.process
        self._left_out: set[str] = set()
        self._blinked: set[InstanceName] = set()

    async def list(self) -> Sequence[Observed]:
        begun = self._world.loop.time()
        shown = await super().list()
        share = 0.5 if self._world.weather.hits("cloud.list_omits") else self._world.blinks
        omitted = {o.handle.id for o in shown if o.handle.id not in self._left_out and self._world.sometimes(share)}
        self._left_out = omitted
        left = self._blink([machine for machine in shown if machine.handle.id not in omitted])
        self._world.watch.budgets.listed(self._process, begun, left)
        return left

    def another(self, machine_id: str) -> None:
        """Do nothing: a late machine has the same id here. At a cloud it has a new id, which was never destroyed."""
        self._destroyed.discard(machine_id)

    def _blink(self, shown: Sequence[Observed]) -> Sequence[Observed]:
        """List some machines with heartbeats as stopped; without a heartbeat, one such listing would end a machine."""
        if not self._world.weather.lasts("cloud.list_stopped"):
            self._blinked = set()
            return shown
        there = {machine.handle.name for machine in shown if machine.state is InstanceState.RUNNING}
        may = sorted(name for name in there - self._blinked if self._beats(name))
        self._blinked = {name for name in may if self._world.sometimes(0.5)}
        for name in self._blinked:
            self._world.strikes.note("cloud.list_stopped", self._world.job_of(name))
        stopped, runs = InstanceState.STOPPED, InstanceState.RUNNING
        return [
            replace(machine, state=stopped)
            if machine.handle.name in self._blinked and machine.state is runs
            else machine
            for machine in shown
        ]

    def _beats(self, name: InstanceName) -> bool:
        """Return True if the machine trains and sent its latest due heartbeat."""
        world = self._world
        if name not in world.cloud.standing() or name in world.body.stopped or name in world.body.silent:
            return False
        own = attempt_of_machine(name)
        at = world.objects.modified.get(keys.heartbeat(own, 0), float("-inf"))
        row = world.state.attempts.get(own)
        trains = row is not None and row.value.state is AttemptState.TRAINING
        return trains and world.loop.time() - at <= world.limits.heartbeat_s + LATE_S
