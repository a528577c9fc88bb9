"""Notifications about a running job, heartbeat by heartbeat: each crossing is reported once, by any broker."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any, cast

import pytest

from broker.controllers.base.context import ControllerContext
from broker.controllers.monitoring import spend_guard
from broker.controllers.monitoring.spend_guard import Guard
from broker.domain.instance import Caps
from broker.domain.job import AttemptState, Event, Job, Signal
from broker.domain.policy import Policy
from broker.domain.workload import SpotHours
from broker.estimator.planning.corrections import NO_CORRECTIONS, Corrections
from broker.estimator.preemption_rate import place_of_offer
from broker.ports import Blobs, Change, Lane, Provider
from broker.quote.guard_decision import GuardDecision, GuardFacts, decide_guard
from tests.conformance.samples import ManualClock, running
from tests.support import build
from tests.support.memory_store.store import MemoryStore
from trainer.contract.documents import Heartbeat

WHERE = ("provider", "cloud", "region", "accelerator")


class Cloud:
    name = "simulated"
    caps = Caps(spot=True, teardown_s=0)


class Rig:
    """A store with one training attempt at $3.6 an hour, and as many brokers as a test asks for."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.seq = 0

    def guard(self, learned: Corrections = NO_CORRECTIONS) -> Guard:
        return Guard(
            ControllerContext(
                installation=build.INSTALLATION, owner="one", store=self.store, blobs=cast(Blobs, None),
                providers={"simulated": cast(Provider, Cloud())}, clock=self.clock,
            ),
            lambda: learned,
        )  # fmt: skip

    async def start(self, **spec: Any) -> Job:
        changed = build.spec(**{"cap_usd": "10", "resources": {"spot": "never"}, **spec})
        _, job = await running(self.store, spec=changed, cap_usd=changed.cap_usd)
        return job

    async def beat(self, after_s: float, **changes: Any) -> None:
        """Advance the time, and let the liveness controller record a heartbeat."""
        self.clock.time += timedelta(seconds=after_s)
        self.seq += 1
        (attempt,) = await self.store.claim_attempts(Lane.LIVENESS, owner="l", lease_s=1, limit=1)
        values = {"attempt": attempt.attempt.id, "boot": "b", "seq": self.seq, "phase": "training", "total_steps": 1000}
        beaten = replace(attempt.attempt, beat=Heartbeat(**(values | changes)))
        assert await self.store.apply([Change(attempt=(attempt.attempt, beaten))]) == [True]

    async def told(self, job: Job) -> list[Event]:
        return [e for e in await self.store.events(job.id, after=0, limit=99) if e.kind.startswith("job.")]


async def test_own_preemption_history_enters_the_forecast() -> None:
    """The cloud says nothing; a market that took away a machine every ten minutes takes this one too."""
    finish = []
    for preemptions in (0, 60_000):
        rig = Rig()
        job = await rig.start(resources={"spot": "allowed"})
        (leased,) = await rig.store.live_attempts()
        own = SpotHours(
            **dict(zip(WHERE, place_of_offer(leased.attempt.line.offer), strict=True)),
            hours=10_000,
            preemptions=preemptions,
        )
        guard = rig.guard(Corrections(spots={place_of_offer(leased.attempt.line.offer): own}))
        for step in range(0, 40, 2):
            await rig.beat(20, step=step)
            await guard.step()
        now = await rig.store.job(job.id)
        assert now is not None
        assert now.forecast is not None
        finish.append(now.forecast.finish_at)
    assert finish[1] > finish[0]


async def test_an_overrun_is_reported_once_with_a_sufficient_cap() -> None:
    rig = Rig()
    job = await rig.start(cap_usd="0.1")
    brokers = [rig.guard(), rig.guard()]
    for step in range(0, 40, 2):
        await rig.beat(20, step=step)
        for broker in brokers:
            await broker.step()
    (told,) = [e for e in await rig.told(job) if e.kind == "job.overrun_forecast"]
    assert "above its cap of $0.1000" in told.message
    assert Decimal(told.data["would_do_usd"]) > Decimal(told.data["usd"]) > Decimal("0.1")
    now = await rig.store.job(job.id)
    assert now is not None
    assert now.forecast is not None
    assert (now.forecast.over_cap, now.forecast.step_s) == (True, 10)
    await rig.store.raise_cap(job.id, Decimal(99), Event(job_id=job.id, kind="job.cap_raised", message=""))
    await rig.beat(20, step=42)
    await brokers[0].step()
    now = await rig.store.job(job.id)
    assert now is not None
    assert now.forecast is not None
    assert not now.forecast.over_cap


async def test_an_attempt_is_judged_once_for_each_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, judged = Rig(), list[int]()
    job = await rig.start()

    def counted(facts: GuardFacts) -> GuardDecision:
        judged.append(facts.beat.seq)
        return decide_guard(facts)

    monkeypatch.setattr(spend_guard, "decide_guard", counted)
    guard = rig.guard()
    await rig.beat(20, step=0)
    for _ in range(3):
        await guard.step()
    assert judged == [1]
    await rig.store.raise_cap(job.id, Decimal(99), Event(job_id=job.id, kind="job.cap_raised", message=""))
    await guard.step()
    assert judged == [1, 1]
    await rig.beat(20, step=2)
    await guard.step()
    assert judged == [1, 1, 2]


async def test_a_deadline_that_will_be_missed_is_reported() -> None:
    rig = Rig()
    job = await rig.start(deadline=(rig.clock.now() + timedelta(hours=1)).isoformat())
    guard = rig.guard()
    for step in range(0, 20, 2):
        await rig.beat(20, step=step)
        await guard.step()
    assert [e.kind for e in await rig.told(job)] == ["job.late_forecast"]


async def test_an_idle_machine_is_reported_once_and_drained_if_requested() -> None:
    rig = Rig()
    job = await rig.start(idle={"action": "notify", "window_s": 60})
    guard = rig.guard()
    for _ in range(20):
        await rig.beat(10, gpu_utilisation=0.0)
        await guard.step()
    (told,) = await rig.told(job)
    assert told.kind == "job.idle"
    assert told.message.endswith(f"it bills on; end it with `gpubroker cancel {job.id}`")
    (attempt,) = await rig.store.attempts(job.id)
    assert (attempt.idle, attempt.signal) == ("gpu", None)
    await rig.beat(10, gpu_utilisation=1.0)
    await guard.step()
    (attempt,) = await rig.store.attempts(job.id)
    assert attempt.idle is None


async def test_a_team_s_policy_ends_what_is_idle_and_the_narrowest_counts() -> None:
    rig = Rig()
    everywhere = {"name": "all", "idle": {"action": "notify", "window_s": 60}}
    await rig.store.put_policy(Policy.model_validate(everywhere))
    own = {"name": "own", "team": "default", "idle": {"action": "drain", "window_s": 60}}
    await rig.store.put_policy(Policy.model_validate(own))
    job = await rig.start()
    guard = rig.guard()
    for _ in range(7):
        await rig.beat(10, gpu_utilisation=0.0)
        await guard.step()
    (attempt,) = await rig.store.attempts(job.id)
    assert attempt.signal is Signal.IDLE
    (one,) = await rig.store.claim_attempts(Lane.INTERRUPTION, owner="i", lease_s=1, limit=1)
    assert one.attempt.id == attempt.id, "its lane is left at once"
    await guard.step()
    assert len(await rig.told(job)) == 1


async def test_a_hung_download_ends_so_that_the_job_continues_elsewhere() -> None:
    rig = Rig()
    job = await rig.start(idle={"download_s": 60})
    guard = rig.guard()
    for _ in range(7):
        await rig.beat(10, phase="loading", network_bytes=5)
        await guard.step()
    (attempt,) = await rig.store.attempts(job.id)
    assert attempt.signal is Signal.HUNG
    assert attempt.state is AttemptState.TRAINING
