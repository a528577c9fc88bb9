"""A cloud that refuses every create: no machine ran, so no cost is charged, and no time is used up."""

from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from broker.domain.errors import ImageRefused, NoCapacity, ProviderError, Rejected, Throttled
from broker.domain.ids import InstanceName
from broker.domain.instance import BootSpec
from broker.domain.job import RESTING_JOB_STATES, AttemptState, JobState, Reason
from broker.domain.market.offer_history import HistoryQuery, MarketGroup
from broker.domain.money import ZERO
from broker.domain.offer import Offer
from broker.domain.tenancy import Tenant
from providers.simulated.config import SimulatedConfig
from tests.clouds.warp import LoopClock
from tests.support.memory_store.store import MemoryStore
from tests.support.rig.simulated_cloud import CloudFaults, SimulatedCloud
from tests.support.rig.virtual_time import VirtualTimeRig, run_in_virtual_time

CONFIG = SimulatedConfig.model_validate(
    {
        "body": "virtual", "hazard_scale": 0, "sold_out": 0,
        "virtual": {"run_s": 60, "boot_s": 30, "beat_s": 5, "tick_s": 0.5},
    }
)  # fmt: skip
REFUSALS = 40


def build(state: Path, **settings: Any) -> VirtualTimeRig:
    return VirtualTimeRig(store=MemoryStore(LoopClock()), config=CONFIG, state=state, **settings)


async def _refused(rig: VirtualTimeRig, accelerators: set[str]) -> set[MarketGroup]:
    """Return the groups of offers that the offer history records as refused."""
    tenant = rig.store.as_tenant(Tenant(team="default", owner="ann", token_id="t"))
    now = rig.clock.now()
    query = HistoryQuery(accelerators=accelerators, since=now - timedelta(days=1), until=now)
    return set((await tenant.offer_history(query)).refused)


def refusing(refusal: ProviderError) -> CloudFaults:
    """Return faults under which creates are refused only after the time of a SkyPilot launch."""
    return CloudFaults(caps={"list_lag_s": 15.0}, create_errors=[refusal] * REFUSALS, create_error_s=60)


@pytest.mark.parametrize("refusal", [NoCapacity("sold out"), Throttled("429", after_s=1.0)])
def test_refusals_cost_neither_money_nor_time(refusal: ProviderError, tmp_path: Path) -> None:
    """Each refusal takes 60 s and a proof of absence. Together they exceed max_duration, which would end the job."""

    async def story() -> None:
        rig = build(tmp_path, faults=refusing(refusal))
        async with rig.running():
            job = await rig.submit(cap_usd="10", max_duration=1800)
            while (stored_job := await rig.store.job(job)) is not None and stored_job.state not in RESTING_JOB_STATES:
                await rig.clock.sleep(10)
            assert stored_job is not None
            assert stored_job.state is JobState.SUCCEEDED, stored_job.reason
            *before, _ = await rig.attempts(job)
            assert len(before) == REFUSALS
            assert {one.charged_usd for one in before} == {ZERO}
            assert stored_job.machine_s < 600
            offers = {MarketGroup.of(one.line.offer) for one in before}
            recorded = await _refused(rig, {group.accelerator for group in offers})
            assert recorded == (offers if isinstance(refusal, NoCapacity) else set()), "throttling is not a shortage"

    run_in_virtual_time(story())


@pytest.mark.parametrize("refusal", [Rejected("bad request"), ImageRefused("no such image")])
def test_a_refusal_that_ends_its_job_costs_nothing_either(refusal: ProviderError, tmp_path: Path) -> None:
    async def story() -> None:
        rig = build(tmp_path, faults=refusing(refusal))
        async with rig.running():
            job = await rig.submit(cap_usd="10", retry={"max": 2})
            while (stored_job := await rig.store.job(job)) is not None and stored_job.state not in RESTING_JOB_STATES:
                await rig.clock.sleep(10)
            assert stored_job is not None
            assert stored_job.spent_usd == ZERO

    run_in_virtual_time(story())


class Broke(SimulatedCloud):
    """Simulated clouds that refuse creates for lack of credit at `broke`; None: at the first cloud with a create."""

    broke: set[str] | None = None
    creates: list[str]

    async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Any:
        self.creates.append(offer.cloud)
        self.broke = {offer.cloud} if self.broke is None else self.broke
        if offer.cloud in self.broke:
            raise Rejected(f"{offer.cloud}: create of {name}: insufficient balance")
        return await super().create(name, offer, boot)


def without_credit(state: Path, broke: set[str] | None = None) -> tuple[VirtualTimeRig, Broke]:
    rig = build(state, cloud=Broke)
    assert isinstance(rig.provider, Broke)
    rig.provider.broke, rig.provider.creates = broke, []
    return rig, rig.provider


def test_cloud_without_credit_is_skipped_and_costs_no_retry(tmp_path: Path) -> None:
    """All jobs skip the cloud."""

    async def story() -> None:
        rig, cloud = without_credit(tmp_path)
        async with rig.running():
            jobs = [await rig.submit(cap_usd="10", retry={"max": 0}) for _ in range(2)]
            await rig.state_of(jobs[0], JobState.SUCCEEDED, JobState.FAILED, within_s=900)
            jobs.append(await rig.submit(cap_usd="10", retry={"max": 0}))
            for job in jobs:
                job_now = await rig.state_of(job, JobState.SUCCEEDED, JobState.FAILED, within_s=900)
                assert (job_now.state, job_now.retries_used) == (JobState.SUCCEEDED, 0), job_now.reason
            first, *others = cloud.creates
            assert len(await rig.attempts(jobs[-1])) == 1
            assert others.count(first) < len(jobs) - 1
            refused = (await rig.attempts(jobs[0]))[0]
            assert refused.detail.startswith(f"{first} refuses: insufficient balance; add credit")
            assert refused.charged_usd == ZERO

    run_in_virtual_time(story())


def test_a_job_whose_only_cloud_refuses_the_account_waits_and_asks_seldom(tmp_path: Path) -> None:
    async def story() -> None:
        rig, cloud = without_credit(tmp_path, {"runpod", "vast", "aws", "lambda"})
        async with rig.running():
            job = await rig.submit(cap_usd="10", retry={"max": 0})
            await rig.clock.sleep(3 * 3600)
            stored_job = await rig.store.job(job)
            assert stored_job is not None
            assert stored_job.state is JobState.QUEUED
            assert "refuses: insufficient balance; add credit" in stored_job.reason
            assert stored_job.spent_usd == ZERO
            assert max(Counter(cloud.creates).values()) <= 6
            cloud.broke = set()
            await rig.state_of(job, JobState.SUCCEEDED, within_s=4000)

    run_in_virtual_time(story())


def test_an_image_that_was_pulled_since_is_not_refused_twice(tmp_path: Path) -> None:
    async def story() -> None:
        refused = ImageRefused("toomanyrequests: you have reached your pull rate limit")
        rig = build(tmp_path, faults=CloudFaults(create_errors=[refused, None, refused]))
        async with rig.running():
            job = await rig.submit(cap_usd="10")
            while not any(attempt.state is AttemptState.TRAINING for attempt in await rig.attempts(job)):
                await rig.clock.sleep(1)
            rig.body._instances.clear()
            job_now = await rig.state_of(job, JobState.SUCCEEDED, JobState.FAILED, within_s=900)
            reasons = [attempt.reason for attempt in await rig.attempts(job)]
            assert reasons[0] is reasons[2] is Reason.IMAGE
            assert (job_now.state, reasons[3]) == (JobState.SUCCEEDED, Reason.COMPLETED), job_now.reason

    run_in_virtual_time(story())


def test_nothing_is_bought_where_the_listing_is_refused(tmp_path: Path) -> None:
    """The broker could neither follow a machine there nor prove its absence."""

    async def story() -> None:
        rig = build(tmp_path, faults=CloudFaults(list_error=Rejected("the key may not list")))
        async with rig.running():
            job = await rig.submit(cap_usd="10")
            await rig.clock.sleep(600)
            stored_job = await rig.store.job(job)
            assert stored_job is not None
            assert (stored_job.state, rig.provider.calls) == (JobState.QUEUED, [])
            assert "simulated refuses to list its machines: the key may not list" in stored_job.reason
            rig.faults.list_error = None
            await rig.state_of(job, JobState.SUCCEEDED, within_s=900)

    run_in_virtual_time(story())
