"""A machine whose create response was lost: adopted once its agent runs and the machine matches the offer."""

import asyncio

import pytest

from broker.domain.errors import OutcomeUnknown, Rejected, Throttled
from broker.domain.ids import JobId
from broker.domain.job import AttemptState, JobState, Reason
from broker.lifecycle.liveness import LivenessTimeouts
from tests.support.rig.broker_rig import ENDLESS, BrokerRig, RigBuilder
from tests.support.rig.launcher_cloud import LauncherCloud, cloud_of, name_of, until_machine_recorded
from tests.support.rig.simulated_cloud import CloudFaults


async def test_a_machine_is_not_adopted_before_its_agent_runs(build_rig: RigBuilder) -> None:
    rig = build_rig(LauncherCloud)
    async with rig.running():
        job = await rig.submit()
        await until_machine_recorded(rig, job)
        assert (await rig.attempts(job))[0].state is AttemptState.LAUNCHING
        cloud_of(rig).setup_allowed.set()
        await rig.state_of(job, JobState.SUCCEEDED)
        assert [call for call, _ in cloud_of(rig).calls].count("create") == 1
        assert await cloud_of(rig).list() == []


async def test_a_launcher_that_dies_between_leaves_no_bare_machine(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = build_rig(LauncherCloud, cloud_faults=CloudFaults(caps={"agent_start_s": 0.3}))
    rig.timeouts = LivenessTimeouts(lost_s=0.5)
    async with rig.running():
        job = await rig.submit()
        await until_machine_recorded(rig, job)
        cloud_of(rig).kill(name_of(job))
        cloud_of(rig).setup_allowed.set()
        await rig.state_of(job, JobState.SUCCEEDED)
        first, second = await rig.attempts(job)
        assert (first.reason, second.reason) == (Reason.INFRASTRUCTURE, Reason.COMPLETED)
        assert first.detail.startswith("machine will never start its agent (create's outcome is unknown: ")
        assert await cloud_of(rig).list() == []


async def test_a_second_broker_adopts_what_the_launcher_of_a_dead_one_has_set_up(build_rig: RigBuilder) -> None:
    rig = build_rig(LauncherCloud, virtual=ENDLESS)
    await rig.market.step()
    job = await rig.submit()
    await taken_over(rig, job)
    async with rig.running("second"):
        cloud_of(rig).setup_allowed.set()
        await rig.completed(job)
        assert [a.reason for a in await rig.attempts(job)] == [Reason.COMPLETED]
        assert [call for call, _ in cloud_of(rig).calls].count("create") == 1


async def taken_over(rig: BrokerRig, job: JobId) -> None:
    """Kill the broker during its call to the launcher, which continues."""
    first = asyncio.create_task(rig.fleet("first").run())
    await until_machine_recorded(rig, job)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_guarantees_of_create_are_requested_for_adopted_machines_too(build_rig: RigBuilder) -> None:
    """`confirm` checks AWS's shutdown behaviour, for example. A `confirm` without an answer is repeated."""
    rig = build_rig(LauncherCloud, virtual=ENDLESS)
    await rig.market.step()
    job = await rig.submit()
    await taken_over(rig, job)
    cloud_of(rig).confirm_errors = [Throttled("asked too much"), OutcomeUnknown("no answer")]
    async with rig.running("second"):
        cloud_of(rig).setup_allowed.set()
        await rig.completed(job)
        assert cloud_of(rig).calls.count(("confirm", name_of(job))) == 3
        assert [a.reason for a in await rig.attempts(job)] == [Reason.COMPLETED]


async def test_an_adopted_machine_that_fails_its_checks_is_destroyed(build_rig: RigBuilder) -> None:
    rig = build_rig(LauncherCloud, virtual=ENDLESS)
    await rig.market.step()
    job = await rig.submit()
    await taken_over(rig, job)
    cloud_of(rig).confirm_errors = [Rejected("it would stop when it shuts down")]
    async with rig.running("second"):
        cloud_of(rig).setup_allowed.set()
        await rig.completed(job)
        first, second = await rig.attempts(job)
        assert (first.reason, first.detail) == (Reason.REJECTED, "it would stop when it shuts down")
        assert second.reason is Reason.COMPLETED
        assert ("destroy", name_of(job)) in cloud_of(rig).calls
