"""A restored database backup: attempt numbers issued after the backup are never issued again."""

from collections.abc import Callable
from typing import Any

import pytest

from broker.controllers.base.context import CostSettings
from broker.controllers.billing.retention import RetentionController
from broker.domain.errors import BlobsUnavailable, OutcomeUnknown
from broker.domain.ids import JobId, attempt_id, instance_name
from broker.domain.instance import BootSpec
from broker.domain.job import AttemptState, Job, JobState, Reason
from broker.domain.offer import GpuAsk
from broker.domain.spec import Retention as Days
from tests.support.rig.broker_rig import ENDLESS, INSTALLATION, BrokerRig, RigBuilder
from trainer.contract import object_keys as keys
from trainer.contract.documents import Desired, Final, Manifest, Outcome

SPEC = b"of before"
STANDS = {"boot_s": 1e6}
"""Machines that do nothing."""


async def lost(rig: BrokerRig, number: int = 1) -> JobId:
    """Return a job that has no row of an attempt that was made."""
    rig.for_sale = ()
    job = await rig.submit()
    await rig.blobs.put(keys.spec(attempt_id(job, number)), SPEC)
    return job


async def bought(rig: BrokerRig, job: JobId, number: int = 1) -> str:
    """Create the machine of an attempt without a row, and return the machine's name."""
    name = instance_name(INSTALLATION, attempt_id(job, number))
    offers = await rig.provider.offers(GpuAsk())
    await rig.provider.create(name, offers[0], BootSpec(env={"GPUBROKER_ATTEMPT": attempt_id(job, number)}))
    return name


async def saved(rig: BrokerRig, job: JobId, number: int = 1) -> str:
    own = attempt_id(job, number)
    key, manifest = (
        keys.checkpoint(job, own, 5, "n") + keys.MANIFEST,
        Manifest(job=job, attempt=own, step=5, kind="script", files=()),
    )
    await rig.blobs.put(key, manifest.model_dump_json().encode())
    return key


def waits(words: str) -> Callable[[Job], bool]:
    return lambda job: job.state is JobState.QUEUED and words in job.reason


async def test_a_restored_job_resumes_after_the_lost_attempts_last_checkpoint(build_rig: RigBuilder) -> None:
    rig = build_rig(virtual=ENDLESS)
    job = await lost(rig)
    manifest = await saved(rig, job)
    rig.for_sale = None
    async with rig.running():
        await rig.completed(job)
    (attempt,) = await rig.attempts(job)
    assert (attempt.number, attempt.resume_from) == (2, (manifest,))
    assert await rig.blobs.get(keys.spec(attempt_id(job, 1))) == SPEC
    found = await rig.until(job, lambda job: job.attempts == 2)
    assert found.retries_used == 0
    assert [e.kind for e in await rig.events(job)].count("job.restored") == 1


@pytest.mark.parametrize("number", [1, 3])
async def test_a_restored_job_waits_while_a_lost_attempts_machine_exists(build_rig: RigBuilder, number: int) -> None:
    """Creates of earlier lost attempts were never sent and left no trace."""
    rig = build_rig(virtual=STANDS)
    job = await lost(rig, number)
    name = await bought(rig, job, number)
    rig.for_sale = None
    async with rig.running():
        held = await rig.until(job, waits(f"{name} at simulated exists and bills"))
        assert f"attempt {number} was bought after the backup" in held.reason
        assert "gpubroker sweep --once --destroy --spared" in held.reason
        assert await rig.machines() == [name]
        rig.body._instances.pop(name).over = True
        await rig.until(job, lambda job: job.attempts == number + 1)
    (attempt,) = await rig.attempts(job)
    assert attempt.number == number + 1


async def test_numbers_behind_one_that_was_never_sent_are_not_issued_again(build_rig: RigBuilder) -> None:
    """Specs alone are left of these attempts."""
    rig = build_rig(virtual=ENDLESS)
    job = await lost(rig, 2)
    rig.for_sale = None
    async with rig.running():
        await rig.completed(job)
    (attempt,) = await rig.attempts(job)
    assert attempt.number == 3


async def test_a_lost_attempt_is_found_though_attempts_cannot_be_listed(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = build_rig(virtual=ENDLESS)
    job = await lost(rig, 2)
    rig.for_sale = None

    async def down(prefix: str) -> frozenset[str]:
        raise BlobsUnavailable("down")

    monkeypatch.setattr(rig.blobs, "folders", down)
    async with rig.running():
        await rig.completed(job)
    (attempt,) = await rig.attempts(job)
    assert attempt.number == 3


async def test_a_job_older_than_the_broker_costs_two_reads_of_specs(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = build_rig(virtual=ENDLESS)
    rig.for_sale = ()
    jobs = [await rig.submit() for _ in range(4)]
    rig.for_sale = None
    read: list[str] = []
    get_range = rig.blobs.get_range

    async def counted(key: str, start: int, size: int) -> bytes | None:
        read.append(key)
        return await get_range(key, start, size)

    monkeypatch.setattr(rig.blobs, "get_range", counted)
    async with rig.running():
        for job in jobs:
            await rig.completed(job)
    assert len([key for key in read if key.endswith("/spec.json")]) <= 2 * len(jobs)


async def test_a_job_younger_than_the_broker_needs_no_list_of_attempts(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = build_rig(virtual=ENDLESS)
    listed: list[str] = []

    async def counted(prefix: str) -> frozenset[str]:
        listed.append(prefix)
        return frozenset()

    monkeypatch.setattr(rig.blobs, "folders", counted)
    rig.for_sale = ()
    async with rig.running():
        first = await rig.submit()
        await rig.stop(first)
        await rig.state_of(first, JobState.CANCELLED)  # placement has begun
        rig.for_sale = None
        await rig.completed(await rig.submit())
    assert listed == []


async def test_a_restored_job_waits_while_a_cloud_lists_no_machines(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = build_rig(virtual=STANDS)
    job = await lost(rig)
    rig.for_sale = None

    async def away() -> Any:
        raise OutcomeUnknown("503")

    async with rig.running():
        with monkeypatch.context() as outage:
            outage.setattr(rig.provider, "list", away)
            await rig.until(job, waits("simulated did not answer; see gpubroker doctor"))
            assert await rig.attempts(job) == []
        await rig.until(job, lambda job: job.attempts == 2)


async def test_a_restored_job_waits_while_the_blob_store_is_unreadable(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = build_rig(virtual=STANDS)
    rig.for_sale = ()
    job = await rig.submit()
    rig.for_sale = None

    async def down(key: str, *_: object, **__: object) -> bytes:
        raise BlobsUnavailable("down")

    async with rig.running():
        with monkeypatch.context() as outage:
            outage.setattr(rig.blobs, "get", down)
            outage.setattr(rig.blobs, "get_range", down)
            await rig.until(job, waits("the blob store cannot be read"))
            assert await rig.attempts(job) == []
        await rig.until(job, lambda job: job.attempts == 1)


@pytest.mark.parametrize(("reason", "state"), [("stopped", JobState.CANCELLED), ("capped", JobState.CAPPED)])
async def test_jobs_stopped_or_capped_after_the_backup_do_not_run_again(
    build_rig: RigBuilder, reason: str, state: JobState
) -> None:
    rig = build_rig(virtual=STANDS)
    job = await lost(rig)
    await drained(rig, job, reason)
    rig.for_sale = None
    async with rig.running():
        ended = await rig.state_of(job, state)
    assert ended.reason == f"{reason} after the backup that this database comes from"
    assert await rig.attempts(job) == []


async def drained(rig: BrokerRig, job: JobId, reason: str) -> None:
    """Write the order that such a broker sent to the first attempt, and the attempt's final report."""
    own = attempt_id(job, 1)
    final, desired = Final(attempt=own, outcome=Outcome.DRAINED), Desired(want="drain", seq=1, reason=reason)
    await rig.blobs.put(keys.desired(own), desired.model_dump_json().encode())
    await rig.blobs.put(keys.final(own), final.model_dump_json().encode())


@pytest.mark.parametrize(
    ("reason", "states"),
    [
        ("stopped", (JobState.CANCELLED,)),
        ("capped", (JobState.CAPPED,)),
        ("", (JobState.RECOVERING, JobState.QUEUED)),  # it drained by itself
    ],
)
async def test_drain_unknown_to_the_database_is_read_from_the_machine(
    build_rig: RigBuilder, reason: str, states: tuple[JobState, ...]
) -> None:
    """The database has no record of a drain; the broker reads the drain's reason from the order that the machine
    received.
    """
    rig = build_rig(virtual=ENDLESS)
    async with rig.running():
        job = await rig.submit()

        async def trains() -> bool:
            return any(attempt.state is AttemptState.TRAINING for attempt in await rig.attempts(job))

        await rig.eventually(trains)
        rig.for_sale = ()
        await drained(rig, job, reason)
        (machine,) = rig.body._instances.values()
        rig.body._instances.clear()
        machine.over = True
        await rig.state_of(job, *states)
    (attempt,) = await rig.attempts(job)
    assert attempt.reason is (Reason(reason) if reason else Reason.PREEMPTED)


async def test_nothing_is_deleted_of_a_job_with_an_unknown_attempts_checkpoints(
    build_rig: RigBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    """The machine may train on, and save: the job was resumed after the backup."""
    rig = build_rig()
    rig.costs = CostSettings(retention=Days(checkpoints_days=0, logs_days=0, data_days=0))
    rig.for_sale = ()
    job = await rig.submit()
    on_its_way = keys.checkpoint(job, attempt_id(job, 1), 6, "n") + "files/model"
    await rig.blobs.put(on_its_way, b"x")
    there = {await saved(rig, job), on_its_way}
    async with rig.running():
        await rig.stop(job)
        await rig.state_of(job, JobState.CANCELLED)
        keeper = RetentionController(rig.fleet("keeper").context)

        async def looked() -> bool:
            await keeper.step()
            stored_job = await rig.store.job(job)
            return stored_job is not None and stored_job.stored is not None

        await rig.eventually(looked)
        await keeper.step()
    assert {blob.key for blob in await rig.blobs.list(keys.checkpoints(job))} == there
    assert (await rig.until(job, lambda _: True)).deleted == {}
    assert f"the database does not know attempt {attempt_id(job, 1)}" in caplog.text
