"""A machine whose create was not heard: adopted once its agent runs and it is what create would have confirmed."""

import asyncio
from collections.abc import Callable

import pytest

from broker.domain.errors import OutcomeUnknown, Rejected, Throttled
from broker.domain.ids import JobId
from broker.domain.job import AttemptState, JobState, Reason
from tests.controllers.house import ENDLESS, House
from tests.controllers.rented import Rented, cloud_of, name_of, standing

Build = Callable[..., House]


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.lifecycle.decisions.launch_decision.CREATE_POLL_S", 0.02)


async def test_a_machine_is_not_adopted_before_its_agent_runs(house: Build) -> None:
    broker = house(Rented)
    async with broker.running():
        job = await broker.submit()
        await standing(broker, job)
        assert (await broker.attempts(job))[0].state is AttemptState.LAUNCHING
        cloud_of(broker).set_up.set()
        await broker.state_of(job, JobState.SUCCEEDED)
        assert [call for call, _ in cloud_of(broker).called].count("create") == 1
        assert await cloud_of(broker).list() == []


async def test_a_launcher_that_dies_between_leaves_no_bare_machine(
    house: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rented, "agent_start_s", 0.3)
    broker = house(Rented)
    async with broker.running():
        job = await broker.submit()
        await standing(broker, job)
        cloud_of(broker).kill(name_of(job))
        cloud_of(broker).set_up.set()
        await broker.state_of(job, JobState.SUCCEEDED)
        first, second = await broker.attempts(job)
        assert (first.reason, second.reason) == (Reason.INFRASTRUCTURE, Reason.COMPLETED)
        assert first.detail.startswith("machine will never start its agent (create's outcome is unknown: ")
        assert await cloud_of(broker).list() == []


async def test_a_second_broker_adopts_what_the_launcher_of_a_dead_one_has_set_up(house: Build) -> None:
    broker = house(Rented, virtual=ENDLESS)
    await broker.market.step()
    job = await broker.submit()
    await taken_over(broker, job)
    async with broker.running("second"):
        cloud_of(broker).set_up.set()
        await broker.completed(job)
        assert [a.reason for a in await broker.attempts(job)] == [Reason.COMPLETED]
        assert [call for call, _ in cloud_of(broker).called].count("create") == 1


async def taken_over(broker: House, job: JobId) -> None:
    """The broker that launches dies with its call to the launcher, which goes on."""
    first = asyncio.create_task(broker.fleet("first").run())
    await standing(broker, job)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_guarantees_of_create_are_requested_for_adopted_machines_too(house: Build) -> None:
    """As AWS's answer to a shutdown; a cloud that does not say is asked again."""
    broker = house(Rented, virtual=ENDLESS)
    await broker.market.step()
    job = await broker.submit()
    await taken_over(broker, job)
    cloud_of(broker).findings = [Throttled("asked too much"), OutcomeUnknown("no answer")]
    async with broker.running("second"):
        cloud_of(broker).set_up.set()
        await broker.completed(job)
        assert cloud_of(broker).called.count(("confirm", name_of(job))) == 3
        assert [a.reason for a in await broker.attempts(job)] == [Reason.COMPLETED]


async def test_an_adopted_machine_that_is_not_what_it_must_be_is_given_back(house: Build) -> None:
    broker = house(Rented, virtual=ENDLESS)
    await broker.market.step()
    job = await broker.submit()
    await taken_over(broker, job)
    cloud_of(broker).findings = [Rejected("it would stop when it shuts down")]
    async with broker.running("second"):
        cloud_of(broker).set_up.set()
        await broker.completed(job)
        first, second = await broker.attempts(job)
        assert (first.reason, first.detail) == (Reason.REJECTED, "it would stop when it shuts down")
        assert second.reason is Reason.COMPLETED
        assert ("destroy", name_of(job)) in cloud_of(broker).called
