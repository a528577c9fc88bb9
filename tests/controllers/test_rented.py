"""Clouds whose launcher sets machines up: wrong machines are destroyed at once, and none stays half set up."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from math import ceil
from typing import Any

import pytest

from broker.domain.ids import InstanceName, JobId, attempt_id
from broker.domain.instance import BootSpec, InstanceState, Observed
from broker.domain.job import AttemptState, Handle, JobState, Reason
from broker.domain.money import usd
from broker.domain.offer import Offer
from broker.lifecycle.liveness import LivenessTimeouts
from tests.support.rig.broker_rig import ENDLESS, QUICK, SAVE_RARELY, SILENT, BrokerRig, RigBuilder
from tests.support.rig.launcher_cloud import LauncherCloud, cloud_of, name_of, until_machine_recorded
from tests.support.rig.simulated_cloud import CloudFaults
from trainer.contract import object_keys as keys
from trainer.contract.documents import Final, Heartbeat, Outcome


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ({"accelerator": "t4"}, Reason.MISMATCH),
        ({"usd_per_hour": Decimal(99)}, Reason.MISMATCH),
        ({"gpu_memory_bytes": 1}, Reason.MISMATCH),
        ({"state": InstanceState.STOPPED}, Reason.PREEMPTED),
        ({"state": InstanceState.GONE}, Reason.PREEMPTED),
    ],
)
async def test_a_wrong_or_lost_machine_is_destroyed_before_its_set_up(
    build_rig: RigBuilder, shown: dict[str, object], reason: Reason
) -> None:
    """The broker cancels its launcher, and the call that waits for the launcher occupies no slot."""
    rig = build_rig(LauncherCloud)
    rig.intervals = replace(QUICK, creates=1)
    cloud = cloud_of(rig)
    cloud.creates_hang = True
    job = await rig.submit()
    cloud.faults.shown[name_of(job)] = shown
    async with rig.running():
        await until_machine_recorded(rig, job, 2)
        cloud.creates_hang = False
        first = (await rig.attempts(job))[0]
        assert (first.state, first.reason) == (AttemptState.ENDED, reason)
        assert ("cancel", name_of(job)) in cloud.calls
        assert [o.handle.name for o in await cloud.list()] == [name_of(job, 2)]
        cloud.setup_allowed.set()
        await rig.state_of(job, JobState.SUCCEEDED)


async def test_a_stopped_launch_is_cancelled_and_destroyed(build_rig: RigBuilder) -> None:
    rig = build_rig(LauncherCloud)
    async with rig.running():
        job = await rig.submit()
        await until_machine_recorded(rig, job)
        await rig.stop(job)
        await rig.state_of(job, JobState.CANCELLED)
        assert ("cancel", name_of(job)) in cloud_of(rig).calls
        assert await cloud_of(rig).list() == []


async def test_a_lost_cancel_is_sent_again(build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt does not end before the launcher has received the cancel."""
    monkeypatch.setattr("broker.controllers.provisioning.creates_in_flight.CANCEL_REPEAT_S", 0.05)
    rig = build_rig(LauncherCloud)
    cloud_of(rig).lost_cancels = 3
    async with rig.running():
        job = await rig.submit()
        await until_machine_recorded(rig, job)
        await rig.stop(job)
        await rig.state_of(job, JobState.CANCELLED)
        assert [call for call, _ in cloud_of(rig).calls].count("cancel") == 4


async def test_a_create_that_takes_too_long_is_cancelled(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = build_rig(LauncherCloud, cloud_faults=CloudFaults(caps={"boot_deadline_s": 0.3}))
    rig.timeouts = LivenessTimeouts(lost_s=0.5)
    async with rig.running():
        job = await rig.submit(retry={"max": 0})
        done = await rig.state_of(job, JobState.FAILED)
        assert done.reason.startswith("boot deadline passed")
        assert ("cancel", name_of(job)) in cloud_of(rig).calls
        assert await cloud_of(rig).list() == []


async def test_a_price_that_jumps_between_quote_and_purchase_is_quoted_again(build_rig: RigBuilder) -> None:
    """The only create slot is busy, so that the second job's create waits while the price rises."""
    rig = build_rig(LauncherCloud)
    rig.intervals = replace(QUICK, creates=1)
    market = rig.market
    async with rig.running():
        await until_machine_recorded(rig, await rig.submit())
        job = await rig.submit()
        await rig.until(job, lambda j: j.state is JobState.ACTIVE)
        (waiting,) = await rig.attempts(job)
        bought, now = waiting.line.offer, rig.clock.now()
        later = [replace(o, seen_at=now) for o in market.offers()]
        rig.for_sale = [replace(o, usd_per_hour=o.usd_per_hour + 1) if o.id == bought.id else o for o in later]
        cloud_of(rig).setup_allowed.set()
        await rig.state_of(job, JobState.SUCCEEDED)
        first, second = await rig.attempts(job)
        before = bought.usd_per_hour
        assert first.reason is Reason.QUOTE_EXPIRED
        assert first.create_sent_at is None
        assert f"from ${before:.4f}/h to ${before + 1:.4f}/h" in first.detail
        assert second.line.offer.id != first.line.offer.id
        row = await rig.store.job(job)
        assert row is not None
        assert row.retries_used == 0


async def test_a_machine_that_its_cloud_has_stopped_is_noticed_and_destroyed(build_rig: RigBuilder) -> None:
    """The machine is evicted without notice and still bills; test_liveness.py tests how soon this is noticed."""
    rig = build_rig(LauncherCloud, virtual={"run_s": 3600, "boot_s": 0.05, "beat_s": 0.1, "tick_s": 0.02})
    rig.timeouts = LivenessTimeouts(beat_s=0.1, stopped_s=0.5, lost_s=0.5)
    cloud = cloud_of(rig)
    cloud.setup_allowed.set()
    async with rig.running():
        job = await rig.submit()

        async def trains() -> bool:
            return any(a.state is AttemptState.TRAINING for a in await rig.attempts(job))

        await rig.eventually(trains)
        await cloud.evict(name_of(job))
        await rig.eventually(lambda: _ended(rig, job))
        (first, *_) = await rig.attempts(job)
        assert first.reason is Reason.PREEMPTED
        assert ("destroy", name_of(job)) in cloud.calls


async def _ended(rig: BrokerRig, job: JobId) -> bool:
    return not (await rig.attempts(job))[0].live


async def test_machine_of_a_failed_job_is_kept_for_its_owner(build_rig: RigBuilder) -> None:
    """The machine of a failed job with `keep_on_failure` is kept until the owner stops the job."""
    rig = build_rig(LauncherCloud, virtual=SILENT)
    cloud = cloud_of(rig)
    cloud.setup_allowed.set()
    async with rig.running():
        job = await _failed_job(rig, keep_on_failure=3600)
        await rig.eventually(lambda: _terminating(rig, job))
        events = [e for e in await rig.events(job) if e.kind == "attempt.machine_kept"]
        assert f"gpubroker ssh {job}" in events[0].message
        await _polled_again(rig, job)
        assert ("destroy", name_of(job)) not in cloud.calls
        await rig.stop(job)
        await rig.state_of(job, JobState.CANCELLED)
        assert await cloud.list() == []


async def _polled_again(rig: BrokerRig, job: JobId) -> None:
    polls = (await rig.attempts(job))[0].epoch

    async def often() -> bool:
        return (await rig.attempts(job))[0].epoch > polls + 3

    await rig.eventually(often)


async def test_a_kept_machine_is_charged_and_destroyed_after_its_time(build_rig: RigBuilder) -> None:
    rig = build_rig(LauncherCloud, virtual=SILENT)
    cloud_of(rig).setup_allowed.set()
    async with rig.running():
        job = await _failed_job(rig, keep_on_failure=1)
        failed = await rig.state_of(job, JobState.FAILED)
        (attempt,) = await rig.attempts(job)
        assert attempt.terminating_since is not None
        assert attempt.charged_to is not None
        assert (attempt.charged_to - attempt.terminating_since).total_seconds() > 1
        assert failed.spent_usd == attempt.charged_usd
        assert await cloud_of(rig).list() == []


async def test_a_job_ends_when_its_kept_machine_is_preempted(build_rig: RigBuilder) -> None:
    rig = build_rig(LauncherCloud, virtual=SILENT)
    cloud_of(rig).setup_allowed.set()
    async with rig.running():
        job = await _failed_job(rig, keep_on_failure=3600)
        await rig.eventually(lambda: _terminating(rig, job))
        cloud_of(rig).faults.shown[name_of(job)] = {"state": InstanceState.STOPPED}
        failed = await rig.state_of(job, JobState.FAILED)
        assert failed.reason == "no such column"


async def test_a_kept_machine_survives_the_loss_of_the_other(build_rig: RigBuilder) -> None:
    rig = build_rig(LauncherCloud, virtual=SILENT)
    cloud = cloud_of(rig)
    cloud.setup_allowed.set()
    async with rig.running():
        job = await _failed_job(rig, keep_on_failure=3600, resources={"nodes": 2})
        await rig.eventually(lambda: _terminating(rig, job))
        cloud.faults.shown[f"{name_of(job)}-1"] = {"state": InstanceState.STOPPED}
        await _polled_again(rig, job)
        assert ("destroy", name_of(job)) not in cloud.calls
        cloud.faults.shown[name_of(job)] = {"state": InstanceState.STOPPED}
        await rig.state_of(job, JobState.FAILED)
        assert await cloud.list() == []


async def test_a_failed_set_up_destroys_the_machine_with_the_reason(build_rig: RigBuilder) -> None:
    """The broker acts although the cloud lists the machine as running and its boot deadline is minutes away."""
    rig = build_rig(LauncherCloud, virtual={**SILENT, "boot_s": 3600})
    cloud = cloud_of(rig)
    cloud.setup_allowed.set()
    job = await rig.submit(retry={"max": 0})
    cloud.faults.shown[name_of(job)] = {"fault": "lambda: cannot pull x; check trainer.image"}
    async with rig.running():
        failed = await rig.state_of(job, JobState.FAILED)
        (attempt,) = await rig.attempts(job)
        assert (attempt.reason, attempt.first_beat_at) == (Reason.INFRASTRUCTURE, None)
        assert attempt.detail == "lambda: cannot pull x; check trainer.image"
        assert attempt.detail in failed.reason
        messages = [e.message for e in await rig.events(job) if attempt.detail in e.message]
        assert messages
        assert await cloud.list() == []


async def test_an_image_refused_to_two_machines_ends_the_job(build_rig: RigBuilder) -> None:
    """The second machine is of another offer; the job fails without using its remaining retries."""
    rig = build_rig(LauncherCloud)
    cloud = cloud_of(rig)
    job = await rig.submit(retry={"max": 5})
    fault = "lambda: cannot pull x (output: manifest unknown)"
    for number in (1, 2):
        cloud.faults.shown[name_of(job, number)] = {"fault": fault, "image_refused": True}
    async with rig.running():
        failed = await rig.state_of(job, JobState.FAILED)
        first, second = await rig.attempts(job)
        assert (first.reason, second.reason) == (Reason.IMAGE, Reason.IMAGE)
        assert first.line.offer.id != second.line.offer.id
        assert failed.reason == fault
        assert await cloud.list() == []


async def test_an_offer_that_sold_another_gpu_is_avoided(build_rig: RigBuilder) -> None:
    rig = build_rig(LauncherCloud)
    cloud = cloud_of(rig)
    job = await rig.submit()
    cloud.faults.shown[name_of(job)] = {"accelerator": "t4"}
    async with rig.running():
        await until_machine_recorded(rig, job, 2)
        cloud.setup_allowed.set()
        await rig.state_of(job, JobState.SUCCEEDED)
        first, second = await rig.attempts(job)
        assert first.reason is Reason.MISMATCH
        assert second.line.offer.id != first.line.offer.id
        blocked = await rig.store.blocked_offers()
        assert "got t4" in blocked[first.line.offer.id]
        other = await rig.submit()
        await rig.state_of(other, JobState.SUCCEEDED)
        assert (await rig.attempts(other))[0].line.offer.id != first.line.offer.id


async def test_a_boot_is_free_where_the_cloud_bills_from_running(build_rig: RigBuilder) -> None:
    """Charges made before the machine was listed as running are offset later; the ledger never falls below the cloud's
    own bill.
    """
    rig = build_rig(LauncherCloud, virtual={"run_s": 2, "boot_s": 0.05, "beat_s": 0.1, "tick_s": 0.02})
    cloud = cloud_of(rig)
    await rig.market.step()
    rig.for_sale = [replace(offer, billed_from="running") for offer in rig.market.offers()]
    job = await rig.submit()
    cloud.faults.shown[name_of(job)] = {"state": InstanceState.STARTING}
    async with rig.running():
        await until_machine_recorded(rig, job)

        async def charged() -> bool:
            (attempt,) = await rig.attempts(job)
            return attempt.charged_usd >= usd(attempt.line.offer.usd_per_hour * 3 / 3600)

        async def known_to_run() -> bool:
            return (await rig.attempts(job))[0].running_at is not None

        async def listed_since() -> bool:
            return cloud.listings > before + 1

        await rig.eventually(charged)
        before = cloud.listings
        await rig.eventually(listed_since)  # as starting, after all that was charged
        assert not await known_to_run()
        runs = rig.clock.now()
        del cloud.faults.shown[name_of(job)]
        await rig.eventually(known_to_run)
        cloud.setup_allowed.set()
        await rig.state_of(job, JobState.SUCCEEDED)
        (attempt,) = await rig.attempts(job)
        assert attempt.running_at is not None
        assert attempt.create_sent_at is not None
        assert attempt.create_sent_at + timedelta(seconds=1) < attempt.running_at <= runs
        assert attempt.charged_to is not None
        rate = attempt.line.offer.usd_per_hour / 3600
        ran_s = ceil((attempt.charged_to - attempt.running_at).total_seconds())
        existed_s = ceil((attempt.charged_to - attempt.create_sent_at).total_seconds())
        assert usd(rate * ran_s) <= attempt.charged_usd < usd(rate * existed_s)


async def test_two_machines_of_a_job_are_charged_and_destroyed(build_rig: RigBuilder) -> None:
    rig = build_rig(LauncherCloud)
    cloud = cloud_of(rig)
    async with rig.running():
        job = await rig.submit(resources={"nodes": 2})
        await until_machine_recorded(rig, job)
        cloud.setup_allowed.set()
        done = await rig.state_of(job, JobState.SUCCEEDED)
        (attempt,) = await rig.attempts(job)
        assert {handle.id for handle in attempt.handles} == {attempt.name, f"{attempt.name}-1"}
        assert {machine for call, machine in cloud.calls if call == "destroy"} == {h.id for h in attempt.handles}
        assert attempt.create_sent_at is not None
        assert attempt.charged_to is not None
        lasted = Decimal(ceil((attempt.charged_to - attempt.create_sent_at).total_seconds()))
        assert done.spent_usd == usd(2 * attempt.line.offer.usd_per_hour * lasted / 3600)
        assert await cloud.list() == []


async def test_one_of_two_machines_lost_ends_the_attempt(build_rig: RigBuilder) -> None:
    rig = build_rig(LauncherCloud, virtual=SILENT)
    cloud = cloud_of(rig)
    cloud.setup_allowed.set()
    async with rig.running():
        job = await rig.submit(resources={"nodes": 2})

        async def trains() -> bool:
            return any(a.state is AttemptState.TRAINING for a in await rig.attempts(job))

        await rig.eventually(trains)
        del cloud.extra[f"{name_of(job)}-1"]
        await rig.eventually(lambda: _ended(rig, job))
        assert (await rig.attempts(job))[0].reason is Reason.PREEMPTED


async def test_a_partial_launch_destroys_all_its_machines(build_rig: RigBuilder) -> None:
    rig = build_rig(LauncherCloud, virtual=ENDLESS)
    cloud = cloud_of(rig)
    async with rig.running():
        job = await rig.submit(resources={"nodes": 3})
        await until_machine_recorded(rig, job)
        del cloud.extra[f"{name_of(job)}-2"]
        cloud.setup_allowed.set()
        await rig.until(job, lambda found: found.attempts > 1)
        await rig.completed(job)
        first = (await rig.attempts(job))[0]
        assert (first.reason, first.detail) == (Reason.MISMATCH, "asked for 3 machines, got 2")
        assert await cloud.list() == []


async def test_an_extra_machine_ends_the_attempt(build_rig: RigBuilder) -> None:
    rig = build_rig(LauncherCloud, virtual=ENDLESS)
    cloud = cloud_of(rig)
    async with rig.running():
        job = await rig.submit()
        await until_machine_recorded(rig, job)
        second = replace(cloud.extra[name_of(job)].handle, id=f"{name_of(job)}-1")
        cloud.extra[second.id] = Observed(handle=second, state=InstanceState.RUNNING)
        cloud.setup_allowed.set()
        await rig.until(job, lambda found: found.attempts > 1)
        await rig.completed(job)
        assert (await rig.attempts(job))[0].reason is Reason.MISMATCH
        assert await cloud.list() == []


class Broken(LauncherCloud):
    """Cloud whose code raises before it calls the cloud, with a secret in the message."""

    async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        raise ValueError("secret-of-the-cloud")


async def test_a_provider_bug_is_reported_without_its_message(build_rig: RigBuilder) -> None:
    rig = build_rig(Broken)

    async def reported() -> bool:
        return any("ValueError at simulated" in a.detail for a in await rig.attempts(job))

    async with rig.running():
        job = await rig.submit()
        await rig.eventually(reported)
        assert "secret-of-the-cloud" not in (await rig.attempts(job))[0].detail
        await rig.stop(job)
        await rig.state_of(job, JobState.CANCELLED)


async def _failed_job(rig: BrokerRig, **spec: Any) -> JobId:
    """Return a job whose agent has written a failed final report while its machine still runs."""
    job = await rig.submit(checkpoint=SAVE_RARELY, **spec)

    async def trains() -> bool:
        return any(a.state is AttemptState.TRAINING for a in await rig.attempts(job))

    await rig.eventually(trains)
    attempt = attempt_id(job, 1)
    last = Final(attempt=attempt, outcome=Outcome.DATA, message="no such column")
    await rig.blobs.put(keys.final(attempt), last.model_dump_json().encode())
    beat = Heartbeat(attempt=attempt, boot="b", seq=99, phase="done")
    await rig.blobs.put(keys.heartbeat(attempt, 0), beat.model_dump_json().encode())
    return job


async def _terminating(rig: BrokerRig, job: JobId) -> bool:
    return (await rig.attempts(job))[0].state is AttemptState.TERMINATING
