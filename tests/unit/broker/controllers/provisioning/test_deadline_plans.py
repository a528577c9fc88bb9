"""Jobs with deadlines are placed and reviewed without a build of a spot plan on the event loop."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import cast
from unittest.mock import patch

import pytest

from broker.blobs import ObstoreBlobs
from broker.controllers.base.context import ControllerContext
from broker.controllers.monitoring import attempt_review
from broker.controllers.monitoring.attempt_review import AttemptReview
from broker.controllers.observation.inventory import Inventory
from broker.controllers.provisioning.placement import Placement
from broker.domain.ids import job_id
from broker.domain.instance import Caps
from broker.domain.job import Job, JobState
from broker.ports import Provider
from broker.quote.spot.plan import SpotPlan, SpotPlanCache, SpotPlanKey
from broker.quote.spot.review import ActiveReview, Stay
from broker.runtime.spot_planner import InlinePlans, PlanRounds, SpotPlanner
from tests.conformance.samples import START, ManualClock, running
from tests.support import build
from tests.support.machines import WORK, offer, spec
from tests.support.memory_store.store import MemoryStore
from tests.unit.broker.controllers.observation.test_inventory import Scripted

ON_DEMAND = offer(id="cloud/on-demand")
SPOT = offer(
    id="cloud/spot", spot=True, usd_per_hour=Decimal("0.80"), on_demand_usd_per_hour=Decimal("2.50"), available=False
)  # fmt: skip
KEY = SpotPlanKey(horizon_min=360.0, slack_min=180.0, changeover_min=6.0, price=0.3, fall=0, rise=0)


class CloudWithSpot(Scripted):
    name = "cloud"
    caps = Caps(spot=True, teardown_s=30, list_lag_s=10, boot_s=60, reaches_local_files=True)


class BrokerWithPlans:
    """A context on a store in memory, and the jobs of the test."""

    def __init__(self, plans: PlanRounds) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.context = ControllerContext(
            installation=build.INSTALLATION, owner="broker", store=self.store,
            blobs=ObstoreBlobs.open("memory://", build.INSTALLATION),
            providers={"cloud": cast(Provider, CloudWithSpot())}, clock=self.clock, plans=plans,
        )  # fmt: skip
        self.inventory = Inventory(self.context)

    async def submit(self, hours: Sequence[float]) -> list[Job]:
        """Submit a job for each deadline, in hours from now."""
        jobs = list[Job]()
        for number, deadline_h in enumerate(hours):
            wanted = spec(deadline=(START + timedelta(hours=deadline_h)).isoformat())
            job = build.job(
                id=job_id(bytes([number]) * 9), spec=wanted, workload=WORK, created_at=START, cap_usd=wanted.cap_usd
            )
            await self.store.submit(job, key=None, body_sha256="", events=())
            jobs.append(job)
        return jobs

    async def place(self) -> None:
        await Placement(self.context, self.inventory, lambda: [ON_DEMAND, SPOT]).step()

    async def reasons(self, jobs: Sequence[Job]) -> list[str]:
        stored = [await self.store.job(job.id) for job in jobs]
        assert all(job is not None and job.state is JobState.QUEUED for job in stored)
        return [job.reason for job in stored if job is not None]


async def test_placement_builds_no_plan_on_the_event_loop() -> None:
    planner = SpotPlanner(cache=SpotPlanCache(), wait_s=60.0)
    broker = BrokerWithPlans(planner)
    jobs = await broker.submit([6, 7, 20])
    try:
        with patch.object(SpotPlan, "_fill_tables", side_effect=AssertionError("built on the event loop")):
            await broker.place()
    finally:
        await planner.close()
    planned = await broker.reasons(jobs)
    assert all("waits for spot until" in reason for reason in planned)
    inline = BrokerWithPlans(InlinePlans())
    same = await inline.submit([6, 7, 20])
    await inline.place()
    assert await inline.reasons(same) == planned


async def test_placement_without_a_plan_waits_for_spot_within_the_guard() -> None:
    planner = SpotPlanner(cache=SpotPlanCache(), command=(sys.executable, "-c", "raise SystemExit"))
    broker = BrokerWithPlans(planner)
    early, late = await broker.submit([20, 0.9])
    try:
        await broker.place()
    finally:
        await planner.close()
    assert "waits for spot until" in (await broker.reasons([early]))[0]
    bought = await broker.store.attempts(late.id)
    assert [attempt.line.offer.id for attempt in bought] == [ON_DEMAND.id]


async def test_a_review_without_a_plan_leaves_the_attempt_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_review, "may_move", lambda job, attempt: True)
    planner = SpotPlanner(cache=SpotPlanCache(), wait_s=0.0)
    broker = BrokerWithPlans(planner)
    await running(broker.store)
    context = replace(broker.context, providers={"simulated": cast(Provider, CloudWithSpot())})
    review = AttemptReview(context, broker.inventory, lambda: (build.offer(spot=True),))
    review.decide = _planned
    with caplog.at_level(logging.INFO):
        await review.step()
    await planner.close()
    assert "its spot plan is not built yet" in caplog.text
    assert "cannot be reviewed" not in caplog.text


def _planned(facts: ActiveReview) -> Stay:
    facts.plans(KEY)
    return Stay(reason="stays")
