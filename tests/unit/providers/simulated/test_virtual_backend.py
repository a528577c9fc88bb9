"""Virtual machines leave in the blob store what an agent would, as the clock advances."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from broker.blobs import ObstoreBlobs
from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import AttemptId, Installation, InstanceName, instance_name
from broker.domain.instance import BootSpec, InstanceState
from providers.local.machine import Machine
from providers.simulated.config import VirtualConfig
from providers.simulated.virtual_backend import VirtualBackend
from tests.unit.providers.clocks import SteppedClock
from tests.unit.providers.waiting import until
from trainer.contract import object_keys as keys
from trainer.contract.documents import AttemptSpec, Desired, Final, Heartbeat, Manifest, Outcome
from trainer.contract.train import CheckpointConfig

OURS = Installation("aaaa")
JOB = "j" * 13
CONFIG = VirtualConfig(run_s=100, steps=1000, boot_s=2, beat_s=5)


class World:
    def __init__(self) -> None:
        self.clock = SteppedClock()
        self.blobs = ObstoreBlobs.open("memory://", OURS)
        self.body = VirtualBackend(self.blobs, self.clock, CONFIG, seed=3)

    async def start(
        self, attempt: str, *, resume_from: tuple[str, ...] = (), lifetime_s: float | None = None, every_s: float = 30
    ) -> InstanceName:
        spec = AttemptSpec(
            installation=OURS, job=JOB, attempt=attempt, number=1,
            resume_from=resume_from, checkpoint=CheckpointConfig(every_s=every_s),
        )  # fmt: skip
        await self.blobs.put(keys.spec(attempt), spec.model_dump_json().encode())
        name = instance_name(OURS, AttemptId(attempt))
        machine = Machine(
            name=name, provider="simulated", region="r", accelerator="l4", gpus=1, spot=True, lifetime_s=lifetime_s
        )
        await self.body.start(machine, BootSpec(env={"GPUBROKER_ATTEMPT": attempt}))
        return name

    async def run(self, seconds: int) -> None:
        """Advance second by second; a second ends when the ticker sleeps again or is idle."""

        async def parked() -> bool:
            return self.clock.asleep > 0 or not any(t.get_name() == "virtual machines" for t in asyncio.all_tasks())

        for _ in range(seconds):
            await until("the ticker's rest", parked)
            self.clock.advance(1.0)
        await until("the ticker's rest", parked)

    async def final(self, attempt: str) -> Final | None:
        data = await self.blobs.get(keys.final(attempt))
        return Final.model_validate_json(data) if data else None

    async def beat(self, attempt: str) -> Heartbeat | None:
        data = await self.blobs.get(keys.heartbeat(attempt, 0))
        return Heartbeat.model_validate_json(data) if data else None

    async def states(self) -> dict[str, InstanceState]:
        return {o.handle.name: o.state for o in await self.body.machines()}


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.body.close()


A, B = "a" * 13, "b" * 13


async def test_a_job_runs_to_its_end(world: World) -> None:
    name = await world.start(A)
    assert await world.states() == {name: InstanceState.STARTING}
    await world.run(4)
    assert await world.states() == {name: InstanceState.RUNNING}
    first = await world.beat(A)
    assert first is not None
    await world.run(20)
    later = await world.beat(A)
    assert later is not None
    assert (later.boot, later.total_steps) == (first.boot, 1000)
    assert later.seq > first.seq
    assert later.step > first.step
    assert (later.loss or 9) < (first.loss or 0)
    await world.run(110)
    final = await world.final(A)
    assert final is not None
    assert (final.outcome, final.step, final.total_steps) == (Outcome.COMPLETED, 1000, 1000)
    assert final.checkpoint is not None
    manifest = Manifest.model_validate_json(await world.blobs.get(final.checkpoint.manifest) or b"")
    assert (manifest.step, manifest.complete, manifest.job, manifest.attempt) == (1000, True, JOB, A)
    assert await world.states() == {name: InstanceState.GONE}


async def test_a_preempted_job_resumes_from_its_last_checkpoint(world: World) -> None:
    name = await world.start(A, lifetime_s=45.0)
    await world.run(60)
    assert await world.states() == {name: InstanceState.GONE}
    assert await world.final(A) is None
    manifests = [info.key for info in await world.blobs.list(keys.checkpoints(JOB))]
    assert len(manifests) == 1
    saved = Manifest.model_validate_json(await world.blobs.get(manifests[0]) or b"").step
    assert 200 < saved < 400
    beat = await world.beat(A)
    assert beat is not None
    assert beat.step > saved
    await world.body.destroy(name)
    await world.start(B, resume_from=("checkpoints/none/manifest.json", manifests[0]))
    await world.run(4)
    resumed = await world.beat(B)
    assert resumed is not None
    assert (resumed.resumed_from, resumed.step) == (saved, saved)
    await world.run(100)
    final = await world.final(B)
    assert final is not None
    assert (final.outcome, final.resumed_from) == (Outcome.COMPLETED, saved)


@pytest.mark.parametrize(("want", "saves"), [("drain", True), ("stop", False)])
async def test_orders_of_the_broker_are_obeyed(world: World, want: str, saves: bool) -> None:
    name = await world.start(A)
    await world.run(20)
    desired = Desired.model_validate({"want": want, "epoch": 1, "seq": 1, "reason": "cap"})
    await world.blobs.put(keys.desired(A), desired.model_dump_json().encode())
    await world.run(7)
    final = await world.final(A)
    assert final is not None
    assert (final.outcome, final.message) == (Outcome.DRAINED, "cap")
    assert 0 < final.step < 1000
    assert (final.checkpoint is not None) == saves
    if final.checkpoint is not None:
        assert final.checkpoint.step == final.step
    assert await world.states() == {name: InstanceState.GONE}


async def test_a_destroyed_machine_writes_nothing_more(world: World) -> None:
    name = await world.start(A)
    await world.run(10)
    await world.body.destroy(name)
    before = await world.blobs.list("")
    await world.run(150)
    assert await world.blobs.list("") == before
    assert await world.states() == {}


async def test_a_missing_spec_is_reported(world: World) -> None:
    name = await world.start(A)
    await world.blobs.delete(keys.spec(A))
    await world.run(5)
    final = await world.final(A)
    assert final is not None
    assert (final.outcome, final.message) == (Outcome.INFRASTRUCTURE, "spec.json is absent")
    assert await world.states() == {name: InstanceState.GONE}


async def test_an_outage_of_the_store_ends_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    name = await world.start(A)
    await world.run(10)
    working = world.blobs.put

    async def down(key: str, data: bytes, *, if_absent: bool = False) -> str:
        raise BlobsUnavailable("down")

    monkeypatch.setattr(world.blobs, "put", down)
    await world.run(120)
    assert await world.states() == {name: InstanceState.RUNNING}
    monkeypatch.setattr(world.blobs, "put", working)
    await world.run(7)
    final = await world.final(A)
    assert final is not None
    assert final.outcome is Outcome.COMPLETED


async def test_the_same_seed_and_names_leave_the_same_objects() -> None:
    async def history() -> list[tuple[str, object]]:
        world = World()
        await world.start(A, lifetime_s=45.0)
        await world.start(B)
        await world.run(130)
        await world.body.close()
        found = await world.blobs.list("")
        return [(info.key, json.loads(await world.blobs.get(info.key) or b"")) for info in found]

    first, second = await history(), await history()
    assert first == second
    assert len(first) > 8
