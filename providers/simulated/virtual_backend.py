"""Virtual machines without processes: the backend writes the blobs that an agent would write, by the injected clock.

The machines end with this process. One ticker serves all machines and wakes a machine only when an event is due.
"""

import asyncio
import contextlib
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from broker.domain.errors import AlreadyExists, BlobError, Gone, Rejected
from broker.domain.ids import InstanceName
from broker.domain.instance import BootSpec, InstanceState, Observed
from broker.domain.job import Handle
from broker.ports import Blobs, Clock
from providers.local.machine import Machine
from providers.simulated.config import VirtualConfig
from providers.simulated.market import rng
from trainer.contract import object_keys
from trainer.contract.documents import AttemptSpec, CheckpointRef, Desired, Final, Heartbeat, Manifest, Outcome

_AT_ONCE = 64
"""Largest number of machines that use the blob store at the same time."""


@dataclass(kw_only=True)
class _Instance:
    """State of one virtual machine and its agent. Times are the clock's monotonic seconds."""

    machine: Machine
    attempt: str
    dies_at: float
    boot: str
    speed: float
    """Speed of this machine; at 1 the whole job takes `run_s`."""
    born: float
    spec: AttemptSpec | None = None
    seq: int = 0
    first_step: int = 0
    trains_from: float = math.inf
    ends_at: float = math.inf
    saves_at: float = math.inf
    saved: CheckpointRef | None = None
    desired: Desired = field(default_factory=Desired)
    sent: int = 0
    """Bytes of all checkpoints that the machine has written."""
    over: bool = False


class VirtualBackend:
    """`MachineBackend` without processes. Its behaviour depends only on seed, machine names, clock and blobs."""

    def __init__(self, blobs: Blobs, clock: Clock, config: VirtualConfig, *, seed: int = 0) -> None:
        self._blobs = blobs
        self._clock = clock
        self._config = config
        self._seed = seed
        self._instances: dict[str, _Instance] = {}
        self._due: list[tuple[float, str, float]] = []
        """Heap of (time due, name, `born`). `born` distinguishes a machine from an earlier machine of the same name."""
        self._ticker: asyncio.Task[None] | None = None

    async def start(self, machine: Machine, boot: BootSpec) -> Handle:
        if machine.name not in self._instances:
            draw, now = rng(self._seed, "virtual", machine.name), self._clock.monotonic()
            self._instances[machine.name] = _Instance(
                machine=machine,
                attempt=boot.env["GPUBROKER_ATTEMPT"],
                born=now,
                dies_at=math.inf if machine.lifetime_s is None else now + machine.lifetime_s,
                boot=f"{draw.getrandbits(32):08x}",
                speed=draw.uniform(0.9, 1.1),
            )
            heapq.heappush(self._due, (now + self._config.boot_s, machine.name, now))
            if self._ticker is None or self._ticker.done():
                self._ticker = asyncio.create_task(self._tick_on(), name="virtual machines")
        return self._instances[machine.name].machine.handle

    async def machines(self) -> Sequence[Observed]:
        if self._ticker is not None and self._ticker.done() and not self._ticker.cancelled():
            self._ticker.result()  # raises the ticker's error, which would otherwise pass unnoticed
        now = self._clock.monotonic()
        return [self._observe(instance, now) for instance in self._instances.values()]

    def reach(self, name: InstanceName, command: Sequence[str]) -> Sequence[str]:
        raise Rejected(f"{name} is a virtual machine: nothing runs there")

    async def destroy(self, name: InstanceName) -> None:
        instance = self._instances.pop(name, None)
        if instance is None:
            raise Gone(f"{name} is absent")
        instance.over = True

    async def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)

    def _observe(self, instance: _Instance, now: float) -> Observed:
        machine = instance.machine
        if instance.over or now >= instance.dies_at:
            return machine.observed(InstanceState.GONE)
        left = instance.dies_at - now
        starting = now < instance.born + self._config.boot_s
        return machine.observed(
            InstanceState.STARTING if starting else InstanceState.RUNNING, left if left <= machine.notice_s else None
        )

    async def _tick_on(self) -> None:
        """Wake machines when they are due, until no machine is due any more; `start` then creates a new ticker."""
        gate = asyncio.Semaphore(_AT_ONCE)

        async def wake(name: str) -> None:
            async with gate:
                await self._wake(name)

        while self._due:
            # Wait at most `boot_s`, because a machine that starts during the wait is due after `boot_s`.
            wait_s = min(self._due[0][0] - self._clock.monotonic(), self._config.boot_s)
            await self._clock.sleep(max(self._config.tick_s, wait_s))
            now, names = self._clock.monotonic(), []
            while self._due and self._due[0][0] <= now:
                _, name, started_at = heapq.heappop(self._due)
                instance = self._instances.get(name)
                if instance is not None and instance.born == started_at:
                    names.append(name)
            await asyncio.gather(*(wake(name) for name in names))

    async def _wake(self, name: str) -> None:
        instance = self._instances.get(name)
        if instance is None or instance.over:
            return
        now = self._clock.monotonic()
        try:
            if instance.spec is None:
                await self._boot(instance, now)
            else:
                await self._advance(instance, instance.spec, now)
        except BlobError:
            pass  # During an outage the agent continues, and retries at its next heartbeat.
        instance.over = instance.over or now >= instance.dies_at
        if not instance.over:
            # Due next: heartbeat, checkpoint, end or preemption. An overdue event is retried after `beat_s`.
            due_times = [at for at in (instance.ends_at, instance.saves_at, instance.dies_at) if at > now]
            heapq.heappush(self._due, (min(now + self._config.beat_s, *due_times), name, instance.born))

    async def _boot(self, instance: _Instance, now: float) -> None:
        if now >= instance.dies_at:
            return
        data = await self._blobs.get(object_keys.spec(instance.attempt))
        if data is None:
            await self._finish(instance, Outcome.INFRASTRUCTURE, 0, "spec.json is absent")
            return
        spec = AttemptSpec.model_validate_json(data)
        instance.first_step = await self._resume(spec)
        left = self._config.run_s * (1 - instance.first_step / self._config.steps) / instance.speed
        instance.trains_from, instance.ends_at = now, now + left
        instance.saves_at = now + spec.checkpoint.max_loss_s
        instance.spec = spec
        await self._beat(instance, instance.first_step)

    async def _resume(self, spec: AttemptSpec) -> int:
        for key in spec.resume_from:
            if data := await self._blobs.get(key):
                return Manifest.model_validate_json(data).step
        return 0

    async def _advance(self, instance: _Instance, spec: AttemptSpec, now: float) -> None:
        """Write the blobs that are due at `now`; after a preemption, only those due before the preemption."""
        until = min(now, instance.dies_at)
        if instance.ends_at <= until:
            await self._save(instance, spec, self._config.steps, complete=True)
            await self._finish(instance, Outcome.COMPLETED, self._config.steps)
            return
        if instance.saves_at <= until:
            missed = math.floor((until - instance.saves_at) / spec.checkpoint.max_loss_s) * spec.checkpoint.max_loss_s
            await self._save(instance, spec, self._step(instance, instance.saves_at + missed))
            instance.saves_at += missed + spec.checkpoint.max_loss_s
        if now >= instance.dies_at:
            return
        step = self._step(instance, now)
        await self._obey(instance, spec, step)
        if not instance.over:
            await self._beat(instance, step)

    async def _obey(self, instance: _Instance, spec: AttemptSpec, step: int) -> None:
        data = await self._blobs.get(object_keys.desired(instance.attempt))
        if data is None:
            return
        desired = Desired.model_validate_json(data)
        if desired.newer_than(instance.desired):
            instance.desired = desired
        if instance.desired.want == "drain":
            await self._save(instance, spec, step)
        if instance.desired.want != "run":
            await self._finish(instance, Outcome.DRAINED, step, instance.desired.reason)

    def _step(self, instance: _Instance, at: float) -> int:
        trained_share = (at - instance.trains_from) * instance.speed / self._config.run_s
        return min(instance.first_step + int(trained_share * self._config.steps), self._config.steps)

    async def _beat(self, instance: _Instance, step: int) -> None:
        if instance.over:
            return
        instance.seq += 1
        beat = Heartbeat(
            attempt=instance.attempt,
            boot=instance.boot,
            seq=instance.seq,
            phase="training",
            step=step,
            total_steps=self._config.steps,
            resumed_from=instance.first_step or None,
            loss=self._loss(step),
            tokens_per_s=self._config.tokens_per_s * instance.speed,
            checkpoint=instance.saved,
            sent_bytes=instance.sent,
        )
        await self._blobs.put(object_keys.heartbeat(instance.attempt, 0), beat.model_dump_json().encode())

    async def _save(self, instance: _Instance, spec: AttemptSpec, step: int, *, complete: bool = False) -> None:
        if instance.over:
            return
        folder = object_keys.checkpoint(spec.job, instance.attempt, step, f"{instance.boot}{instance.seq:x}")
        manifest = Manifest(
            job=spec.job,
            attempt=instance.attempt,
            step=step,
            kind="train" if spec.train else "script",
            files=(),
            complete=complete,
        )
        # A put whose reply was lost may be repeated, because its bytes are the same.
        data = manifest.model_dump_json().encode()
        await self._blobs.put(folder + object_keys.MANIFEST, data)
        instance.sent += len(data)
        instance.saved = CheckpointRef(manifest=folder + object_keys.MANIFEST, step=step)

    async def _finish(self, instance: _Instance, outcome: Outcome, step: int, message: str = "") -> None:
        if instance.over:
            return
        completed = outcome is Outcome.COMPLETED
        final = Final(
            attempt=instance.attempt,
            outcome=outcome,
            message=message,
            exit_code=0 if completed else None,
            step=step,
            total_steps=self._config.steps,
            resumed_from=instance.first_step or None,
            checkpoint=instance.saved,
            heldout_loss_before=self._loss(0) if completed else None,
            heldout_loss_after=self._loss(step) if completed else None,
            tokens_per_s=self._config.tokens_per_s * instance.speed,
            boot=instance.boot,
            sent_bytes=instance.sent,
        )
        with contextlib.suppress(AlreadyExists):
            await self._blobs.put(object_keys.final(instance.attempt), final.model_dump_json().encode(), if_absent=True)
        instance.over = True

    def _loss(self, step: int) -> float:
        return 2.0 + 2.0 * math.exp(-3.0 * step / self._config.steps)
