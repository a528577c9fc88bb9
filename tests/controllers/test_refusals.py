"""A cloud that refuses every create: nothing stood, so nothing is paid, and no time is used up."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.domain.errors import ImageRefused, NoCapacity, ProviderError, Rejected, Throttled
from broker.domain.ids import InstanceName
from broker.domain.instance import BootSpec, Caps, Observed
from broker.domain.job import RESTING_JOB_STATES, AttemptState, JobState, Reason
from broker.domain.money import ZERO
from broker.domain.offer import Offer
from providers.simulated.config import SimulatedConfig
from providers.simulated.provider import SimulatedProvider
from tests.clouds.warp import LoopClock
from tests.controllers.virtual import Virtual, told
from tests.support.memory_store.store import MemoryStore

CONFIG = SimulatedConfig.model_validate(
    {
        "body": "virtual", "hazard_scale": 0, "sold_out": 0,
        "virtual": {"run_s": 60, "boot_s": 30, "beat_s": 5, "tick_s": 0.5},
    }
)  # fmt: skip
REFUSALS = 40


class Refuses(SimulatedProvider):
    """Takes its time for it, as a launch of SkyPilot does."""

    refusals: list[ProviderError]

    @property
    def caps(self) -> Caps:
        return replace(super().caps, list_lag_s=15.0)

    async def create(self, *asked: Any) -> Any:
        if self.refusals:
            await asyncio.sleep(60)
            raise self.refusals.pop()
        return await super().create(*asked)


@pytest.mark.parametrize("refusal", [NoCapacity("sold out"), Throttled("429", after_s=1.0)])
def test_refusals_cost_neither_money_nor_time(refusal: ProviderError, tmp_path: Path) -> None:
    """Each took 60 s and a proof of absence: together more than its max_duration, at which it would have ended."""

    async def story() -> None:
        house = Virtual(store=MemoryStore(LoopClock()), config=CONFIG, state=tmp_path, cloud=Refuses)
        house.provider.refusals = [refusal] * REFUSALS  # type: ignore[attr-defined]
        async with house.running():
            job = await house.submit(cap_usd="10", max_duration=1800)
            while (found := await house.store.job(job)) is not None and found.state not in RESTING_JOB_STATES:
                await house.clock.sleep(10)
            assert found is not None
            assert found.state is JobState.SUCCEEDED, found.reason
            *before, _ = await house.attempts(job)
            assert len(before) == REFUSALS
            assert {one.charged_usd for one in before} == {ZERO}
            assert found.machine_s < 600

    told(story())


@pytest.mark.parametrize("refusal", [Rejected("bad request"), ImageRefused("no such image")])
def test_a_refusal_that_ends_its_job_costs_nothing_either(refusal: ProviderError, tmp_path: Path) -> None:
    async def story() -> None:
        house = Virtual(store=MemoryStore(LoopClock()), config=CONFIG, state=tmp_path, cloud=Refuses)
        house.provider.refusals = [refusal] * REFUSALS  # type: ignore[attr-defined]
        async with house.running():
            job = await house.submit(cap_usd="10", retry={"max": 2})
            while (found := await house.store.job(job)) is not None and found.state not in RESTING_JOB_STATES:
                await house.clock.sleep(10)
            assert found is not None
            assert found.spent_usd == ZERO

    told(story())


class Broke(SimulatedProvider):
    """Has no credit at the clouds `broke`; None: at the one that is bought from first."""

    broke: set[str] | None = None
    creates: list[str]

    async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Any:
        self.creates.append(offer.cloud)
        self.broke = {offer.cloud} if self.broke is None else self.broke
        if offer.cloud in self.broke:
            raise Rejected(f"{offer.cloud}: create of {name}: insufficient balance")
        return await super().create(name, offer, boot)


def broke_house(state: Path, broke: set[str] | None = None) -> tuple[Virtual, Broke]:
    house = Virtual(store=MemoryStore(LoopClock()), config=CONFIG, state=state, cloud=Broke)
    assert isinstance(house.provider, Broke)
    house.provider.broke, house.provider.creates = broke, []
    return house, house.provider


def test_cloud_without_credit_is_skipped_and_costs_no_retry(tmp_path: Path) -> None:
    """A cloud without credit is passed over by all jobs and costs no retry."""

    async def story() -> None:
        house, cloud = broke_house(tmp_path)
        async with house.running():
            jobs = [await house.submit(cap_usd="10", retry={"max": 0}) for _ in range(2)]
            await house.state_of(jobs[0], JobState.SUCCEEDED, JobState.FAILED, within_s=900)
            jobs.append(await house.submit(cap_usd="10", retry={"max": 0}))
            for job in jobs:
                found = await house.state_of(job, JobState.SUCCEEDED, JobState.FAILED, within_s=900)
                assert (found.state, found.retries_used) == (JobState.SUCCEEDED, 0), found.reason
            first, *others = cloud.creates
            assert len(await house.attempts(jobs[-1])) == 1
            assert others.count(first) < len(jobs) - 1
            refused = (await house.attempts(jobs[0]))[0]
            assert refused.detail.startswith(f"{first} refuses: insufficient balance; add credit")
            assert refused.charged_usd == ZERO

    told(story())


def test_a_job_whose_only_cloud_refuses_the_account_waits_and_asks_seldom(tmp_path: Path) -> None:
    async def story() -> None:
        house, cloud = broke_house(tmp_path, {"runpod", "vast", "aws", "lambda"})
        async with house.running():
            job = await house.submit(cap_usd="10", retry={"max": 0})
            await house.clock.sleep(3 * 3600)
            found = await house.store.job(job)
            assert found is not None
            assert found.state is JobState.QUEUED
            assert "refuses: insufficient balance; add credit" in found.reason
            assert found.spent_usd == ZERO
            assert max(Counter(cloud.creates).values()) <= 6
            cloud.broke = set()
            await house.state_of(job, JobState.SUCCEEDED, within_s=4000)

    told(story())


class Registry(SimulatedProvider):
    """Refuses the image of the first and the third create, as a registry that limits pulls does."""

    creates = 0

    async def create(self, *asked: Any) -> Any:
        self.creates += 1
        if self.creates in (1, 3):
            raise ImageRefused("toomanyrequests: you have reached your pull rate limit")
        return await super().create(*asked)


def test_an_image_that_was_pulled_since_is_not_refused_twice(tmp_path: Path) -> None:
    async def story() -> None:
        house = Virtual(store=MemoryStore(LoopClock()), config=CONFIG, state=tmp_path, cloud=Registry)
        async with house.running():
            job = await house.submit(cap_usd="10")
            while not any(one.state is AttemptState.TRAINING for one in await house.attempts(job)):
                await house.clock.sleep(1)
            house.body._instances.clear()
            found = await house.state_of(job, JobState.SUCCEEDED, JobState.FAILED, within_s=900)
            reasons = [one.reason for one in await house.attempts(job)]
            assert reasons[0] is reasons[2] is Reason.IMAGE
            assert (found.state, reasons[3]) == (JobState.SUCCEEDED, Reason.COMPLETED), found.reason

    told(story())


class Unlisted(SimulatedProvider):
    """Sells to a key that may not list."""

    shut = True
    creates = 0

    async def list(self) -> Sequence[Observed]:
        if self.shut:
            raise Rejected("the key may not list")
        return await super().list()

    async def create(self, *asked: Any) -> Any:
        self.creates += 1
        return await super().create(*asked)


def test_nothing_is_bought_where_the_listing_is_refused(tmp_path: Path) -> None:
    """What is bought there could neither be followed nor proven to be gone."""

    async def story() -> None:
        house = Virtual(store=MemoryStore(LoopClock()), config=CONFIG, state=tmp_path, cloud=Unlisted)
        cloud = house.provider
        assert isinstance(cloud, Unlisted)
        async with house.running():
            job = await house.submit(cap_usd="10")
            await house.clock.sleep(600)
            found = await house.store.job(job)
            assert found is not None
            assert (found.state, cloud.creates) == (JobState.QUEUED, 0)
            assert "simulated refuses to list its machines: the key may not list" in found.reason
            cloud.shut = False
            await house.state_of(job, JobState.SUCCEEDED, within_s=900)

    told(story())
