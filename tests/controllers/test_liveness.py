"""Replayed outages never count as deaths; deaths and notices are detected in time. All in virtual time."""

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.domain.errors import BlobsUnavailable, OutcomeUnknown
from broker.domain.instance import InstanceState, Observed
from broker.domain.job import AttemptState, JobState, Reason
from providers.simulated.config import SimulatedConfig
from providers.simulated.virtual_backend import VirtualBackend
from tests.clouds.paper import FarBlobs
from tests.clouds.warp import LoopClock
from tests.controllers.detection import Delays, measure
from tests.support.memory_store.store import MemoryStore
from tests.support.rig.broker_rig import SAVE_RARELY, SILENT, config
from tests.support.rig.simulated_cloud import CloudFaults, DeathShown, SimulatedCloud
from tests.support.rig.virtual_time import WORTH, VirtualTimeRig, run_in_virtual_time
from trainer.contract import object_keys as keys
from trainer.contract.documents import Final, Outcome

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json"))
Spans = Sequence[Sequence[float]]


def within(spans: Spans, now: float) -> bool:
    return any(start <= now < end for start, end in spans)


class TracedCloud(SimulatedCloud):
    """Cloud whose listings follow a trace while every machine runs."""

    trace: dict[str, Any]

    async def list(self) -> Sequence[Observed]:
        now = self._clock.monotonic()
        if within(self.trace.get("listing_times_out", ()), now):
            await self._clock.sleep(60)
            raise OutcomeUnknown("list: timed out")
        if within(self.trace.get("listing_omits", ()), now):
            return ()
        return await super().list()

    def as_listed(self, machine: Observed) -> Observed | None:
        if within(self.trace.get("listing_stopped", ()), self._clock.monotonic()):
            return Observed(handle=machine.handle, state=InstanceState.STOPPED)
        return super().as_listed(machine)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_an_outage_costs_no_recovery_and_no_work(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = json.loads(path.read_text())
    ends = max(end for name, spans in trace.items() if name != "source" for _, end in spans)
    config = SimulatedConfig.model_validate(
        {
            "body": "virtual", "hazard_scale": 0, "sold_out": 0,
            "virtual": {"run_s": ends + 300, "boot_s": 30, "beat_s": 5, "tick_s": 0.5},
        }
    )  # fmt: skip
    ask = FarBlobs._call

    async def or_down(self: FarBlobs, verb: str, key: str, call: Any) -> Any:
        if within(trace.get("blobs_down", ()), LoopClock().monotonic()):
            if asyncio.iscoroutine(call):
                call.close()  # was never begun
            raise BlobsUnavailable("down")
        return await ask(self, verb, key, call)

    monkeypatch.setattr(FarBlobs, "_call", or_down)
    beat = VirtualBackend._beat

    async def or_lost(self: VirtualBackend, *args: Any) -> None:
        if not within(trace.get("beats_lost", ()), LoopClock().monotonic()):
            await beat(self, *args)

    monkeypatch.setattr(VirtualBackend, "_beat", or_lost)

    async def story() -> None:
        cloud = type("ReplayedCloud", (TracedCloud,), {"trace": trace})
        faults = CloudFaults(caps={"list_lag_s": 10.0})
        rig = VirtualTimeRig(store=MemoryStore(LoopClock()), config=config, state=tmp_path, cloud=cloud, faults=faults)
        async with rig.running():
            job = await rig.submit(**WORTH)
            await rig.train([job])
            row = await rig.store.job(job)
            while row and row.state is JobState.ACTIVE and rig.clock.monotonic() < ends + 1000:
                await rig.clock.sleep(10)
                row = await rig.store.job(job)
            (attempt,) = await rig.attempts(job)
        assert row is not None
        assert (row.state, attempt.reason) == (JobState.SUCCEEDED, Reason.COMPLETED)
        assert attempt.final is not None
        assert attempt.final.step == attempt.final.total_steps
        assert attempt.final.resumed_from is None

    run_in_virtual_time(story())


@pytest.mark.parametrize(
    ("shown", "lag_s", "within_s"),
    [("gone", 0.0, 5), ("stopped", 10.0, 20), ("omitted", 10.0, 30)],
)
def test_a_death_without_notice_is_known_in_time(shown: DeathShown, lag_s: float, within_s: float) -> None:
    delays = measure(shown, lag_s, jobs=12)
    assert min(delays.terminating) >= 0
    assert Delays.share(delays.terminating, 95) <= within_s
    assert Delays.share(delays.planned, 95) <= within_s + lag_s + 10


def test_a_notice_starts_a_drain_within_five_seconds(tmp_path: Path) -> None:
    config = SimulatedConfig.model_validate(
        {
            "body": "virtual", "hazard_scale": 0, "sold_out": 0, "notice_s": 120,
            "virtual": {"run_s": 1e6, "boot_s": 30, "beat_s": 5, "tick_s": 0.5},
        }
    )  # fmt: skip

    async def story() -> None:
        rig = VirtualTimeRig(store=MemoryStore(LoopClock()), config=config, state=tmp_path)
        provider, draw = rig.provider, random.Random(3)
        async with rig.running():
            jobs = [await rig.submit(**WORTH) for _ in range(12)]
            for attempt in await rig.train(jobs):
                provider.preempt(attempt.name, after_s=120 + draw.uniform(20, 60))
            waits: dict[str, float] = {}
            while len(waits) < len(jobs) and rig.clock.monotonic() < 600:
                for job in jobs:
                    first = (await rig.attempts(job))[0]
                    if first.state is not AttemptState.TRAINING and first.name not in waits:
                        waits[first.name] = rig.clock.monotonic() - (provider.died_at[first.name] - 120)
                await rig.clock.sleep(0.25)
            assert len(waits) == len(jobs)
            await rig.clock.sleep(300)
            for job in jobs:
                first, second = await rig.attempts(job)
                assert first.reason is Reason.PREEMPTED
                assert first.final is not None  # the machine was asked for a checkpoint, and committed one
                assert second.resume_from
        assert 0 <= min(waits.values()) <= max(waits.values()) <= 5

    run_in_virtual_time(story())


def test_a_final_report_is_read_without_its_last_heartbeat(tmp_path: Path) -> None:
    """The machine runs until it is destroyed. The complete job is not treated as hung and trained again."""

    async def story() -> None:
        rig = VirtualTimeRig(store=MemoryStore(LoopClock()), config=config(virtual=SILENT), state=tmp_path)
        async with rig.running():
            job = await rig.submit(checkpoint=SAVE_RARELY)
            (attempt,) = await rig.train([job])
            final = Final(attempt=attempt.id, outcome=Outcome.COMPLETED, step=100, total_steps=100, boot="b")
            await rig.blobs.put(keys.final(attempt.id), final.model_dump_json().encode())
            written_at = rig.clock.monotonic()
            await rig.state_of(job, JobState.SUCCEEDED)
            assert rig.clock.monotonic() < written_at + 60
            assert [attempt.reason for attempt in await rig.attempts(job)] == [Reason.COMPLETED]

    run_in_virtual_time(story())
