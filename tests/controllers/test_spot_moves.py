"""A job on demand returns to spot when spot is back: by a drain and a new attempt, in time, and within its cap."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from broker.controllers.base.context import Intervals
from broker.domain.errors import NoCapacity
from broker.domain.ids import InstanceName
from broker.domain.instance import BootSpec, InstanceState, Observed
from broker.domain.job import RESTING_JOB_STATES, Attempt, Event, Handle, Job, JobState, Reason
from broker.domain.money import LedgerKind
from broker.domain.offer import GpuAsk, Offer
from broker.quote import engine
from broker.quote.spot.review import MIN_STAY_S
from providers.simulated.config import SimulatedConfig
from tests.clouds.warp import LoopClock
from tests.support.machines import SMOLLM2_135M, WORK
from tests.support.memory_store.store import MemoryStore
from tests.support.rig.simulated_cloud import SimulatedCloud
from tests.support.rig.virtual_time import VirtualTimeRig, run_in_virtual_time
from trainer.contract.documents import Outcome

HOUR = 3600.0
STEPS = 6000
RUN_H = 3.7
"""Hours of the whole job, as its quote expects; the P90 is twice as long."""
CONFIG = SimulatedConfig.model_validate(
    {
        "body": "virtual", "hazard_scale": 0, "sold_out": 0, "price_period_s": 1e9,
        "virtual": {"run_s": RUN_H * HOUR, "steps": STEPS, "boot_s": 60, "beat_s": 30, "tick_s": 5},
    }
)  # fmt: skip
SLOW = Intervals(
    poll_s=10, look_s=15, list_s=10, billing_s=30, sweep_s=120, replace_s=60, lease_s=120, grants_s=600, deadman_s=600
)  # fmt: skip
"""A story of half a day needs no rounds of a second."""
WORKLOAD = replace(WORK, shape=SMOLLM2_135M, steps=STEPS, eval_rows=0)


class CloudWithSpells(SimulatedCloud):
    """Cloud that sells one machine on demand, and spot machines during spells only; they end with the spell."""

    spells: Sequence[tuple[float, float]] = ()
    """Begin and end of each spell, in hours of its clock."""
    reports_spells = True
    """False: the market lists spot as on sale outside of its spells as well, and a create is refused."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bought: dict[str, tuple[Offer, float]] = {}
        self.ended_at: dict[str, float] = {}

    async def offers(self, ask: GpuAsk) -> Sequence[Offer]:
        listed = [offer for offer in await super().offers(ask) if offer.id.startswith("simulated/runpod")]
        is_up = self._is_up()
        return [
            replace(
                offer, emulated_on=None, simulated=False,
                available=None if not offer.spot or is_up or not self.reports_spells else False,
            )
            for offer in listed
            if (offer.accelerator, offer.gpus) == ("l40s", 1)
        ]  # fmt: skip

    async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        if offer.spot and not self._is_up():
            self.calls.append(("create", name))
            raise NoCapacity("no spot capacity")
        handles = await super().create(name, offer, boot)
        self.bought[name] = (offer, self._clock.monotonic())
        if offer.spot:
            end = next(end for _, end in self.spells if end * HOUR > self._clock.monotonic())
            self.preempt(name, after_s=end * HOUR - self._clock.monotonic())
        return handles

    async def destroy(self, handle: Handle) -> None:
        await super().destroy(handle)
        self.ended_at.setdefault(handle.name, self._clock.monotonic())

    async def list(self) -> Sequence[Observed]:
        """Return the machines; one that has ended by itself is billed until the first listing that shows its end."""
        listed = await super().list()
        for machine in listed:
            if machine.state is InstanceState.GONE:
                self.ended_at.setdefault(machine.handle.name, self._clock.monotonic())
        return listed

    def billed_usd(self) -> Decimal:
        """Return the dollars of all machines up to now."""
        return sum((self._billed_usd(name) for name in self.bought), Decimal(0))

    def _billed_usd(self, name: str) -> Decimal:
        (offer, since), now = self.bought[name], self._clock.monotonic()
        end = min(self.ended_at.get(name, now), self.died_at.get(name, now))
        return offer.usd_per_hour * Decimal(end - since) / 3600

    def _is_up(self) -> bool:
        return any(start <= self._clock.monotonic() / HOUR < end for start, end in self.spells)


@dataclass(kw_only=True)
class SpotStory:
    """A finished job with all that it left behind."""

    job: Job
    attempts: Sequence[Attempt]
    events: Sequence[Event]
    hours: float
    billed_usd: Decimal
    """Dollars of all machines, each from its create to its destroy or its preemption."""
    ledger_usd: Decimal

    def ends(self) -> list[tuple[str, Reason | None]]:
        """Return market and end reason of each attempt that had a machine."""
        return [
            ("spot" if attempt.line.offer.spot else "on demand", attempt.reason)
            for attempt in self.attempts
            if attempt.first_beat_at is not None
        ]

    def texts(self, kind: str) -> list[str]:
        return [event.message for event in self.events if event.kind == kind]


def told(
    state: Path, spells: Sequence[tuple[float, float]], *, deadline_h: float, reports: bool = True, **spec: Any
) -> SpotStory:
    """Run a job in virtual time until it ends."""
    stories: list[SpotStory] = []

    async def story() -> None:
        rig = VirtualTimeRig(
            store=MemoryStore(LoopClock()), config=CONFIG, state=state, cloud=CloudWithSpells, intervals=SLOW
        )
        cloud = rig.provider
        assert isinstance(cloud, CloudWithSpells)
        cloud.spells, cloud.reports_spells = spells, reports
        async with rig.running():
            began = rig.clock.now()
            deadline = (began + timedelta(hours=deadline_h)).isoformat()
            values = {"cap_usd": "100", "checkpoint": {"every_s": 300}, "deadline": deadline} | spec
            job_id = await rig.submit(WORKLOAD, **values)
            while (job := await rig.store.job(job_id)) is not None and job.state not in RESTING_JOB_STATES:
                await rig.clock.sleep(60)
            assert job is not None
            charges = [entry for entry in await rig.store.ledger(job_id) if entry.kind is LedgerKind.CHARGE]
            stories.append(
                SpotStory(
                    job=job,
                    attempts=await rig.attempts(job_id),
                    events=await rig.events(job_id),
                    hours=((job.finished_at or rig.clock.now()) - began).total_seconds() / HOUR,
                    billed_usd=cloud.billed_usd(),
                    ledger_usd=sum((entry.usd for entry in charges), Decimal(0)),
                )
            )

    run_in_virtual_time(story())
    return stories[0]


def check_money(story: SpotStory) -> None:
    """Require that the ledger equals the cloud's bill, up to the proof of absence of each machine."""
    machines = sum(attempt.first_beat_at is not None for attempt in story.attempts)
    longest = Decimal("0.86") * machines * 60 / 3600
    assert story.ledger_usd == story.job.spent_usd == sum(attempt.charged_usd for attempt in story.attempts)
    assert story.billed_usd <= story.ledger_usd <= story.billed_usd + longest
    assert story.ledger_usd <= story.job.cap_usd


def test_a_job_waits_for_spot_falls_to_on_demand_and_returns_to_spot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The virtual machine's speed is near the tolerance, and the measured speed moves the end of the wait by hours.
    monkeypatch.setattr(engine, "MEASURED_TOLERANCE", -1.0)
    story = told(tmp_path, [(0.5, 1.5), (7.2, 99)], deadline_h=12)
    assert story.job.state is JobState.SUCCEEDED, story.job.reason
    assert story.hours < 12
    assert story.ends() == [
        ("spot", Reason.PREEMPTED), ("on demand", Reason.MOVED), ("spot", Reason.COMPLETED),
    ]  # fmt: skip
    check_money(story)
    first, second = story.texts("job.waiting")
    assert first.startswith("waits for spot until")
    assert second.startswith("waits for spot until")
    (moves,) = story.texts("attempt.moves")
    assert "moves to spot in us-ks-2" in moves
    assert ", saves $" in moves
    assert any("moves to spot in us-ks-2" in text for text in story.texts("attempt.draining"))
    assert any("recovering (moves to spot in us-ks-2" in text for text in story.texts("job.recovering"))
    assert (story.job.retries_used, story.job.preemptions_without_progress) == (0, 0)
    on_demand, back = story.attempts[1:]
    assert on_demand.final is not None
    assert on_demand.final.outcome is Outcome.DRAINED
    assert back.resume_from  # the move lost no step that the drain saved


def test_a_market_that_lists_spot_and_refuses_it_moves_a_job_seldom(tmp_path: Path) -> None:
    """Each fruitless move doubles the stay, so their number is the logarithm of the time on demand."""
    story = told(tmp_path, [], deadline_h=10, reports=False)
    assert story.job.state is JobState.SUCCEEDED, story.job.reason
    assert story.hours < 10
    moved = [attempt for attempt in story.attempts if attempt.reason is Reason.MOVED]
    assert 1 <= len(moved) <= 4
    trained = [
        (attempt.terminating_since - attempt.first_beat_at).total_seconds()
        for attempt in moved
        if attempt.terminating_since and attempt.first_beat_at
    ]
    assert all(stayed_s >= MIN_STAY_S * 2**number for number, stayed_s in enumerate(trained))
    assert story.job.retries_used == 0
    check_money(story)


def test_spot_that_flaps_makes_no_job_late(tmp_path: Path) -> None:
    spells = [(start / 4, start / 4 + 0.2) for start in range(1, 200, 2)]
    story = told(tmp_path, spells, deadline_h=11)
    assert story.job.state is JobState.SUCCEEDED, story.job.reason
    assert story.hours < 11
    check_money(story)


def test_a_cap_holds_through_moves(tmp_path: Path) -> None:
    story = told(tmp_path, [(0.5, 1.5), (7.2, 99)], deadline_h=12, cap_usd="1.6")
    assert story.job.state in {JobState.SUCCEEDED, JobState.CAPPED}
    check_money(story)
