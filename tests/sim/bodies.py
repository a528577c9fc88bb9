"""Virtual machines that save and resume by the trainer's own checkpoint protocol, and stop by its dead-man's switch."""

import contextlib
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from broker.domain.errors import BlobError, BlobsUnavailable
from broker.domain.ids import AttemptId, Installation, InstanceName, instance_name
from broker.domain.instance import SELF_STOP_S, BootSpec, InstanceState, Observed
from broker.domain.job import Handle
from providers.local.machine import Machine
from providers.simulated.virtual_backend import VirtualBackend, _Instance
from tests.sim.disk import WEIGHTS, Died, Folder, Line, trained, weights
from tests.sim.measures import attempt_of_machine
from trainer.agent.base.prepare import furthest
from trainer.agent.dead_man_switch import DeadMan
from trainer.checkpoint import protocol as checkpoint
from trainer.checkpoint.protocol import Origin
from trainer.contract import object_keys as keys
from trainer.contract.documents import AttemptSpec, CheckpointRef, Desired, Heartbeat, Manifest, Outcome
from trainer.objectstore.objects import Objects, ObjectStoreError

if TYPE_CHECKING:
    from tests.sim.world import World

FAILURES = (Outcome.USER_ERROR, Outcome.DATA, Outcome.OOM, Outcome.INFRASTRUCTURE)
"""Outcomes after which a machine may be kept for an inspection (`keep_on_failure`)."""


@dataclass(kw_only=True)
class Trainee:
    """State of one attempt's agent. `began_with`: restored weights of step `first`."""

    origin: Origin
    objects: Objects
    disk: Any
    """`Folder` with the files of the next save."""
    began_with: bytes
    first: int
    deadman: DeadMan


class Body(VirtualBackend):
    """Machine backend with silent agents, machines that stop or die during a save, and trainers that outlive their
    machines.
    """

    world: "World"
    silent: set[str]
    stopped: dict[str, float]
    """Stopped machines, which bill until they are destroyed, with the time since which listings show the stop."""
    returned: dict[str, float]
    """Machines that were stopped and run again, with the time of their restart."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.silent, self.stopped, self.returned = set(), {}, {}
        self._finished: set[str] = set()
        """Machines whose agents have written the final report. They bill until they are destroyed or end themselves."""
        self._self_stop_s: dict[str, float] = {}
        self._unstarted: set[str] = set()
        """Machines whose launchers have not started an agent yet."""
        self._called: dict[str, float] = {}
        self._trainees: dict[str, Trainee] = {}

    def standing(self) -> list[InstanceName]:
        """Return machines that bill now."""
        now = self._clock.monotonic()
        return [
            instance.machine.name
            for instance in self._instances.values()
            if not instance.over and now < instance.dies_at
        ]

    def running(self) -> list[InstanceName]:
        return [name for name in self.standing() if name not in self.stopped]

    def working(self) -> set[InstanceName]:
        """Return machines whose agents have been started and send heartbeats."""
        return {one for one in self.running() if one not in self.silent | self._unstarted}

    def training(self) -> list[_Instance]:
        """Return machines whose agents work."""
        now = self._clock.monotonic()
        return [
            instance
            for instance in self._instances.values()
            if instance.spec is not None
            and not instance.over
            and now < instance.dies_at
            and not self._does_nothing(instance.machine.name)
        ]

    async def come_back(self, name: str) -> None:
        """Restart a stopped machine; its agent starts from zero, as after a reboot."""
        one, now = self._instances.get(InstanceName(name)), self._clock.monotonic()
        if name not in self.world.cloud.standing():
            return
        del self.stopped[name]
        self.returned[name] = now
        self.world.note("cloud", f"{name} runs again")
        self.world.watch.measures.whole_again(attempt_of_machine(name))
        if one is None:
            return  # one of several, which has no agent here
        one.boot, one.seq, one.spec, one.saved, one.sent = f"{int(one.boot, 16) ^ 1:08x}", 0, None, None, 0
        one.desired, one.saves_at, one.ends_at = Desired(), math.inf, math.inf
        if keys.final(one.attempt) in self.world.objects.data:
            self.silent.add(name)  # it has nothing to do

    def _does_nothing(self, name: str) -> bool:
        return name in self._finished or self.is_stuck(name)

    def is_stuck(self, name: str) -> bool:
        """Return True if the machine never ends itself."""
        return name in self.silent or name in self.stopped

    def _observe(self, instance: _Instance, now: float) -> Observed:
        shown = super()._observe(instance, now)
        stops = now >= self.stopped.get(instance.machine.name, math.inf) and shown.state is not InstanceState.GONE
        return replace(shown, state=InstanceState.STOPPED) if stops else shown

    def waits_for_launcher(self, name: str) -> None:
        self._unstarted.add(name)

    def agent_started(self, name: str) -> None:
        self._unstarted.discard(name)

    def preempt(self, name: str, notice_s: float, *, with_notice: bool = True) -> None:
        """End the machine after `notice_s` seconds. `with_notice`: the machine receives the preemption notice."""
        one, now = self._instances[name], self._clock.monotonic()
        if with_notice:
            self._called[name] = now
            one.machine = replace(one.machine, notice_s=max(notice_s, one.machine.notice_s))
        one.dies_at = min(one.dies_at, now + notice_s)

    def announced_s(self, one: _Instance) -> float:
        """Return the seconds for which listings announced a machine's death before it came."""
        return one.dies_at - max(one.born, one.dies_at - one.machine.notice_s, self._called.get(one.machine.name, 0.0))

    async def start(self, machine: Machine, boot: BootSpec) -> Handle:
        new = machine.name not in self._instances
        handle = await super().start(machine, boot)
        if new:
            self._finished.discard(machine.name)
            self._self_stop_s[machine.name] = float(boot.env.get("GPUBROKER_SELF_STOP_S", SELF_STOP_S))
            self.world.born(machine)
        return handle

    def died_at(self, name: InstanceName) -> float | None:
        """Return the death of a machine that died before its agent was next due; its billing ends there."""
        one = self._instances.get(name)
        return one.dies_at if one is not None and not one.over and self._clock.monotonic() >= one.dies_at else None

    async def destroy(self, name: InstanceName) -> None:
        one = self._instances.get(name)
        if self.died_at(name) is not None:
            self.world.over(name)
        await super().destroy(name)
        if one is not None:
            self.world.destroyed(name)

    async def _wake(self, name: str) -> None:
        one = self._instances.get(name)
        if (self._does_nothing(name) or name in self._unstarted) and one is not None and not one.over:
            self._rest(one)
        else:
            try:
                await super()._wake(name)
            except Died:
                self.world.note("cloud", f"{name} died while it saved")
                if one is not None and not one.over:
                    self._rest(one)
        if one is not None and one.over:
            self.world.over(name)

    def _rest(self, one: _Instance) -> None:
        """Wait without work until the machine is preempted."""
        now = self._clock.monotonic()
        one.over = now >= one.dies_at
        if not one.over:
            heapq.heappush(self._due, (min(now + self._config.beat_s, one.dies_at), one.machine.name, one.born))

    # ------------------------------------------------------------------------------------------------- its agent's work

    async def _advance(self, instance: _Instance, spec: AttemptSpec, now: float) -> None:
        try:
            await super()._advance(instance, spec, now)
        except BlobError:
            self._trainees[instance.attempt].deadman.unreadable()
            raise

    async def _resume(self, spec: AttemptSpec) -> int:
        name = instance_name(Installation(spec.installation), AttemptId(spec.attempt))
        mine = self._trainees[spec.attempt] = self._trainee(spec, self._instances[name])
        folder: Any = Folder()
        try:
            load = partial(self._restore, mine, folder)
            found = await furthest(mine.objects, spec, mine.origin, load)
        except ObjectStoreError as e:
            raise BlobsUnavailable(str(e)) from e
        if found is not None:
            key, manifest = found
            self.world.watch.keeping.loaded(spec, key, manifest, folder.files)
            mine.began_with, mine.first = folder.files[WEIGHTS], manifest.step
        return mine.first

    async def _restore(self, mine: Trainee, folder: Any, candidates: Sequence[str]) -> tuple[str, Manifest] | None:
        return await checkpoint.restore(
            mine.objects, candidates, folder, kind=mine.origin.kind, log=lambda why: self.world.note("cloud", why)
        )

    def _trainee(self, spec: AttemptSpec, instance: _Instance | None) -> Trainee:
        """Return a trainer. `instance` None: the trainer continues without its machine."""

        def survives(written: str) -> None:
            if instance is None:
                return
            if written.endswith(f"/{WEIGHTS}") and self.world.tears_save(instance.machine.name):
                instance.dies_at = min(instance.dies_at, self._clock.monotonic())
                instance.over = True
            if instance.over or instance.machine.name in self.stopped:
                raise Died

        line: Any = Line(blobs=self._blobs, survives=survives)
        return Trainee(
            origin=Origin(job=spec.job, attempt=spec.attempt, kind="train" if spec.train else "script"),
            objects=Objects(line, spec.installation), disk=Folder(), first=0,
            began_with=weights(self.world.lineage(spec.job), 0), deadman=DeadMan(spec.limits.deadman_s),
        )  # fmt: skip

    async def _save(self, instance: _Instance, spec: AttemptSpec, step: int, *, complete: bool = False) -> None:
        if instance.over:
            return
        mine = self._trainees[instance.attempt]
        saved = trained(mine.began_with, self.world.lineage(spec.job), mine.first, step)
        instance.sent += len(saved)
        instance.saved = await self._commit(mine, saved, step, complete=complete)
        try:
            guard = spec.train.guard if spec.train else None
            await checkpoint.prune(mine.objects, mine.origin, spec.checkpoint, guard)
        except ObjectStoreError:
            return  # older ones go next time

    async def _commit(self, mine: Trainee, saved: bytes, step: int, *, complete: bool = False) -> CheckpointRef:
        mine.disk.files[WEIGHTS] = saved
        try:
            key, _ = await checkpoint.commit(
                mine.objects, mine.origin, mine.disk, step=step, complete=complete, taken_s=0.0
            )
        except ObjectStoreError as e:
            raise BlobsUnavailable(str(e)) from e
        return CheckpointRef(manifest=key, step=step)

    async def _obey(self, instance: _Instance, spec: AttemptSpec, step: int) -> None:
        await super()._obey(instance, spec, step)
        if instance.over or instance.machine.name in self._finished:
            return
        deadman = self._trainees[instance.attempt].deadman
        deadman.observe(await self._blobs.get(keys.BROKER_LEASE), self._clock.monotonic())
        if deadman.expired:
            await self._save(instance, spec, step)
            await self._finish(instance, Outcome.DEADMAN, step, "the broker's lease is stale")

    async def _finish(self, instance: _Instance, outcome: Outcome, step: int, message: str = "") -> None:
        if instance.over:
            return
        await super()._finish(instance, outcome, step, message)
        name, instance.over, instance.seq = instance.machine.name, False, instance.seq + 1
        instance.dies_at = min(instance.dies_at, self._clock.monotonic() + self._self_stop_s[name])
        self._finished.add(name)
        if self.world.weather.draw("last beat is lost") < 0.1:
            return  # then its silence reveals the end
        last = Heartbeat(attempt=instance.attempt, boot=instance.boot, seq=instance.seq, phase="done", step=step)
        with contextlib.suppress(BlobError):
            await self._blobs.put(keys.heartbeat(instance.attempt, 0), last.model_dump_json().encode())

    async def fail(self, name: str, which: float) -> None:
        """End the trainer without success; a draw from [0, 1) chooses the outcome."""
        one = self._instances.get(name)
        if one is None or one.spec is None or self._does_nothing(name):
            return
        outcome = FAILURES[int(which * len(FAILURES))]
        with contextlib.suppress(BlobError):  # then it continues
            await self._finish(one, outcome, self._step(one, self._clock.monotonic()), f"failed: {outcome}")

    async def _beat(self, instance: _Instance, step: int) -> None:
        if instance.machine.name in self._finished:
            return
        await super()._beat(instance, step)
        for node in self.mates(instance.machine.name):
            mate = Heartbeat(
                attempt=instance.attempt, node=node, boot=instance.boot, seq=instance.seq, phase="training"
            )
            await self._blobs.put(keys.heartbeat(instance.attempt, node), mate.model_dump_json().encode())

    def mates(self, name: str) -> Sequence[int]:
        """Return the numbers of working machines other than the first; a surplus machine has no agent."""
        cloud = self.world.cloud
        own = [i for i in cloud.extra if i.startswith(f"{name}-") and i not in cloud.surplus and i not in self.stopped]
        return [int(i.removeprefix(f"{name}-")) for i in own]

    async def haunt(self, name: str, for_s: float) -> None:
        """Let a machine continue after its destroy: it sends heartbeats, saves, and writes a final report."""
        one = self._instances.get(name)
        if one is None or one.spec is None:
            return
        until, spec, step = self._clock.monotonic() + for_s, one.spec, 0
        mine = self._trainee(spec, None)
        while self._clock.monotonic() < until:
            await self._clock.sleep(self._config.beat_s)
            if not one.over:
                continue
            step = max(step, one.saved.step if one.saved else 0) + 1
            self.world.struck("zombie_trainer", name)
            try:
                beat = Heartbeat(attempt=one.attempt, boot=one.boot, seq=10_000 + step, phase="training", step=step)
                await self._blobs.put(keys.heartbeat(one.attempt, 0), beat.model_dump_json().encode())
                last = min(step, self._config.steps - 1)
                await self._commit(mine, weights(self.world.lineage(spec.job), last), last)
            except BlobError:
                continue
