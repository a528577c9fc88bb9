"""Execution of each fault of a plan."""

import asyncio
import contextlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from broker.domain.errors import NoCapacity
from broker.domain.ids import InstanceName, JobId
from broker.domain.instance import BootSpec
from broker.domain.job import Attempt
from tests.sim.disk import WEIGHTS
from tests.sim.faults import CALM_S, Fault
from tests.sim.loop import Process
from tests.sim.measures import attempt_of_machine

if TYPE_CHECKING:
    from tests.sim.world import Slot, World

T = TypeVar("T")
POLL_S = 10.0
"""Seconds between two checks for a target of a fault."""
DEAD_S = 20.0


class Happenings:
    def __init__(self, world: "World") -> None:
        self._world = world
        self.away: tuple[float, float] | None = None
        """Span in which no broker wrote the state that the next broker reads."""
        self._nobody = False

    async def happen(self, fault: Fault) -> None:
        world = self._world
        await asyncio.sleep(fault.at)
        world.note("fault", str(fault))
        if fault.kind in world.weather.now:
            world.weather.now[fault.kind].append(fault)
            world.watch.able()
            await asyncio.sleep(fault.for_s)
            world.weather.now[fault.kind].remove(fault)
            world.watch.able()
            return
        slot = world.slots[fault.target % len(world.slots)]
        if fault.kind == "late_machine":
            await self._late_machine(fault)
        elif fault.kind == "away":
            await self._leave(fault)
        elif fault.kind == "restored":
            await world.backups.restore(fault)
        elif fault.kind == "kill":
            await self._crash(slot, fault)
        elif fault.kind == "freeze":
            await self._freeze(slot, fault)
        elif fault.kind == "clock":
            world.strikes.note(fault.kind)
            slot.skew_s = slot.clock.skew_s = slot.process.skew_s = fault.share
        elif fault.kind in ("stop", "raise_cap"):
            await world.people.decide(fault)
        elif fault.kind == "rot":
            await self._rot(fault)
        else:
            await self._machine(fault)

    # --- brokers

    async def _crash(self, slot: "Slot", fault: Fault) -> None:
        """Crash a process at one of its next awaits, drawn from the share; at the latest before its slot starts
        again.
        """
        process = slot.process
        if process.dead:
            return
        self._world.strikes.note(fault.kind)
        process.kill_at = process.steps + 1 + int(fault.share * 400)
        await asyncio.sleep(fault.for_s)
        self._again(slot, process)

    async def die_launching(self, process: Process) -> None:
        """Kill the broker while one of its creates is in progress."""
        slot = next(one for one in self._world.slots if one.process is process)
        await self._world.pause(0.0, 2.0)
        process.kill_at = process.steps + 1
        await self._world.pause(1.0, DEAD_S)
        self._again(slot, process)

    def _again(self, slot: "Slot", process: Process) -> None:
        if not process.dead:
            self._world.kill(process)
        if slot.process is process and not self._nobody:
            self._world.start(slot)

    async def _leave(self, fault: Fault) -> None:
        """Kill every broker, and start all of them again at the same time."""
        self._world.strikes.note(fault.kind)
        self.all_leave(self._world.loop.time())
        await asyncio.sleep(fault.for_s)
        self.all_return()

    def all_leave(self, since: float) -> None:
        """Record that all brokers left. `since`: time of their last durable write."""
        self.away, self._nobody = (since, math.inf), True
        for process in (slot.process for slot in self._world.slots if not slot.process.dead):
            self._world.kill(process)

    def all_return(self) -> None:
        assert self.away is not None
        self.away, self._nobody = (self.away[0], self._world.loop.time()), False
        for slot in self._world.slots:
            self._world.start(slot)

    async def _freeze(self, slot: "Slot", fault: Fault) -> None:
        world, process = self._world, slot.process
        if process.dead or process.frozen:
            return
        world.strikes.note(fault.kind)
        process.frozen = True
        world.watch.able()
        await asyncio.sleep(fault.for_s)
        world.note(process.id, "goes on")
        world.loop.thaw(process)
        world.watch.able()

    # --- machines

    async def _late_machine(self, fault: Fault) -> None:
        """A launcher that was proven dead still creates a machine, after the second absence: the cloud lied.

        Once for each attempt: clouds give a second machine another id, this one does not.
        """
        world = self._world

        def ended() -> list[Attempt]:
            rows = (world.state.attempts[i].value for i in world.state.by_lane[None])
            return [row for row in rows if row.create_sent_at is not None and row.name not in world.late]

        one = await self._one_of(ended, fault)
        if one is None:
            return
        world.struck(fault.kind, one.name)
        world.late.add(one.name)
        boot = BootSpec(env={"GPUBROKER_ATTEMPT": one.id})
        with contextlib.suppress(NoCapacity):
            await world.cloud.create(one.name, one.line.offer, boot)

    async def _one_of(self, found: Callable[[], list[T]], fault: Fault) -> T | None:
        """Wait for a target that the fault can strike, and return it; None: the calm came first."""
        there = found()
        while not there and self._world.loop.time() < CALM_S:
            await asyncio.sleep(POLL_S)
            there = found()
        return there[fault.target % len(there)] if there else None

    async def _machine(self, fault: Fault) -> None:
        """Apply a fault to a running machine."""
        world = self._world
        if fault.kind in ("lose_node", "node_stops"):
            nodes = await self._one_of(lambda: sorted(world.cloud.extra.keys() - world.cloud.surplus), fault)
            if nodes is not None:
                await (self._lose_node(nodes) if fault.kind == "lose_node" else self._halt_node(nodes, fault))
            return
        name = await self._one_of(lambda: sorted(world.body.running()), fault)
        if name is None:
            return
        if fault.kind != "zombie_trainer":
            world.struck(fault.kind, name)
        if fault.kind == "preempt":
            world.body.preempt(name, 0.0)
        elif fault.kind == "preempt_with_notice":
            world.body.preempt(name, fault.for_s, with_notice=world.hints)
        elif fault.kind == "trainer_fails":
            await world.body.fail(name, fault.share)
        elif fault.kind == "silence":
            world.body.silent.add(name)
        elif fault.kind == "host_stops":
            await self._halt(name, fault)
        elif fault.kind == "zombie_trainer":
            world.spawn(world.body.haunt(name, fault.for_s), "zombie")

    async def _halt(self, name: InstanceName, fault: Fault) -> None:
        """Stop a machine, as an offline host or a higher bid does; listings show this within their lag. Some return."""
        world, now = self._world, self._world.loop.time()
        world.note("cloud", f"stopped {name}")
        world.body.stopped[name] = now + fault.share * world.cloud.caps.list_lag_s
        world.watch.lost(attempt_of_machine(name), now)
        if fault.for_s and fault.target % 2:
            await asyncio.sleep(fault.for_s)
            await world.body.come_back(name)

    async def _halt_node(self, node: str, fault: Fault) -> None:
        """Stop one machine of several, whose first one continues."""
        self._world.struck(fault.kind, node)
        await self._halt(InstanceName(node), fault)

    async def _lose_node(self, lost: str) -> None:
        world, now = self._world, self._world.loop.time()
        world.struck("lose_node", lost)
        del world.cloud.extra[lost]
        world.note("cloud", f"lost {lost}")
        world.watch.died(lost, now)
        world.watch.lost(attempt_of_machine(lost), now)

    async def die_young(self, name: InstanceName) -> None:
        """End a machine within the time for which listings may omit it; no listing ever shows it."""
        world = self._world
        await asyncio.sleep(world.cloud.caps.list_lag_s * world.weather.draw("dies young"))
        if name in world.body.standing():
            await world.body.destroy(name)
            world.watch.lost(attempt_of_machine(name), world.loop.time())

    async def _rot(self, fault: Fault) -> None:
        """Damage the newest checkpoint of a running job in the store."""
        world = self._world

        def saved() -> list[str]:
            going_on = [own for own in world.jobs if not world.is_over(own)]
            found = [[key for key in world.objects.below(f"checkpoints/{own}/") if key.endswith(f"/{WEIGHTS}")]
                     for own in going_on]  # fmt: skip
            return [max(keys, key=lambda key: key.split("/")[3]) for keys in found if keys]

        key = await self._one_of(saved, fault)
        if key is not None:
            world.struck(fault.kind, f"gb-test-{key.split('/')[2]}")
            world.note("fault", f"{key} rots")
            world.watch.keeping.rotten.add(JobId(key.split("/")[1]))
            world.objects.put(key, b"rotten", world.loop.time())
