"""One bad row, one bad machine, or one dead component: all other jobs continue, and money stays counted."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from broker.billing.accrual import accrued
from broker.domain.errors import BlobsUnavailable, NoCapacity, OutcomeUnknown
from broker.domain.ids import AttemptId, JobId, attempt_id, instance_name
from broker.domain.instance import BootSpec, Liveness
from broker.domain.job import AttemptState, Event, Handle, JobState, Reason
from broker.domain.money import LedgerKind, usd
from tests.support.rig.broker_rig import INSTALLATION, SAVE_RARELY, SILENT, BrokerRig, RigBuilder
from trainer.contract import object_keys as keys

LONG = {"run_s": 3600, "boot_s": 0.05, "beat_s": 0.1, "tick_s": 0.02}


async def test_a_nonsense_heartbeat_harms_no_other_job(build_rig: RigBuilder) -> None:
    async with build_rig().running() as rig:
        bad = await rig.submit()
        key = keys.heartbeat(attempt_id(bad, 1), 0)
        saved = b'{"manifest": "m", "step": 1, "save_s": NaN}'
        await rig.blobs.put(key, b'{"attempt": "a", "boot": "b", "seq": 1, "checkpoint": ' + saved + b"}")
        await rig.state_of(bad, JobState.SUCCEEDED)
        await rig.state_of(await rig.submit(), JobState.SUCCEEDED)


async def test_a_manifest_at_a_nonsense_key_harms_no_job(build_rig: RigBuilder) -> None:
    async with build_rig().running() as rig:
        origin = await rig.submit()
        await rig.state_of(origin, JobState.SUCCEEDED)
        await rig.blobs.put(f"checkpoints/{origin}/x/nonsense/manifest.json", b"{}")
        heir = await rig.submit(init_from=f"job/{origin}")
        await rig.state_of(heir, JobState.SUCCEEDED)
        (attempt,) = await rig.attempts(heir)
        assert attempt.resume_from
        assert not any("nonsense" in key for key in attempt.resume_from)


async def test_a_refusal_that_takes_long_is_still_a_refusal(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look-up of the create by name, in the meantime, must not invalidate the late answer."""
    rig = build_rig()
    create, calls = rig.provider.create, []

    async def slow(*asked: Any) -> Any:
        calls.append(asked)
        await asyncio.sleep(0.3)
        if len(calls) == 1:
            raise NoCapacity("sold out")
        return await create(*asked)

    monkeypatch.setattr(rig.provider, "create", slow)
    async with rig.running():
        job = await rig.submit()
        await rig.state_of(job, JobState.SUCCEEDED)
        assert [a.reason for a in await rig.attempts(job)] == [Reason.NO_CAPACITY, Reason.COMPLETED]
        assert len(calls) == 2


async def test_a_failing_destroy_delays_no_other_destroy(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = build_rig(virtual=SILENT)  # agents ignore a drain, so that every machine runs until it is destroyed
    rig.limits = rig.limits.model_copy(update={"drain_s": 0.3})
    async with rig.running():
        bad = await rig.submit(checkpoint=SAVE_RARELY)
        destroy, name = rig.provider.destroy, instance_name(INSTALLATION, attempt_id(bad, 1))

        async def broken(handle: Handle) -> None:
            if handle.name == name:
                raise RuntimeError("a bug in the provider")
            await destroy(handle)

        monkeypatch.setattr(rig.provider, "destroy", broken)
        others = [await rig.submit(checkpoint=SAVE_RARELY) for _ in range(3)]
        for job in (bad, *others):
            await rig.eventually(lambda job=job: _is(rig, job, AttemptState.TRAINING))  # type: ignore[misc]
            await _stop(rig, job)
        for job in others:
            await rig.state_of(job, JobState.CANCELLED)
        assert await rig.machines() == [name]


async def test_a_draining_machine_is_ended_also_while_the_blob_store_is_down(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = build_rig(virtual=LONG)
    rig.limits = rig.limits.model_copy(update={"drain_s": 0.5})
    async with rig.running():
        job = await rig.submit()
        await rig.eventually(lambda: _is(rig, job, AttemptState.TRAINING))

        with monkeypatch.context() as outage:
            _blobs_down(rig, outage)
            await _stop(rig, job)
            await rig.eventually(lambda: _none_left(rig))
            await rig.eventually(lambda: _proven_absent(rig, job))
        await rig.state_of(job, JobState.CANCELLED)
        (attempt,) = await rig.attempts(job)
        assert attempt.absent_at is not None
        assert attempt.charged_to is not None
        # Every charge moves its fence by a microsecond at least, also one that covers no time.
        assert timedelta(0) <= attempt.charged_to - attempt.absent_at < timedelta(milliseconds=1)
        assert attempt.charged_usd == accrued(attempt, attempt.charged_to)


async def test_a_proven_absence_outlives_the_process_that_proved_it(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unreachable blob store delays the last charge, and a broker without the cloud's listings has no proof of its
    own. Charges stop nevertheless."""
    rig = build_rig(virtual=LONG)
    rig.limits = rig.limits.model_copy(update={"drain_s": 0.5})
    async with rig.running():
        job = await rig.submit()
        await rig.eventually(lambda: _is(rig, job, AttemptState.TRAINING))

        async def silent() -> Any:
            raise OutcomeUnknown("no answer")

        with monkeypatch.context() as outage:
            _blobs_down(rig, outage)
            await _stop(rig, job)
            await rig.eventually(lambda: _proven_absent(rig, job))
            outage.setattr(rig.provider, "list", silent)
            (proven,) = await rig.attempts(job)

            async def looked_at_again() -> bool:
                return (await rig.attempts(job))[0].epoch >= proven.epoch + 3

            await rig.eventually(looked_at_again)
            assert [a.absent_at for a in await rig.attempts(job)] == [proven.absent_at]
        await rig.state_of(job, JobState.CANCELLED)
        assert [a.absent_at for a in await rig.attempts(job)] == [proven.absent_at]


async def test_a_wrong_machine_is_ended_also_while_the_blob_store_is_down(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = build_rig(virtual=LONG | {"boot_s": 3600})
    async with rig.running():
        job = await rig.submit()
        await rig.eventually(lambda: _is(rig, job, AttemptState.BOOTING))
        listed = rig.provider.list

        async def wrong() -> Any:
            return [replace(machine, accelerator="t4") for machine in await listed()]

        with monkeypatch.context() as outage:
            _blobs_down(rig, outage)
            outage.setattr(rig.provider, "list", wrong)
            await rig.eventually(lambda: _proven_absent(rig, job))
        await rig.eventually(lambda: _is(rig, job, AttemptState.ENDED))
        assert (await rig.attempts(job))[0].reason is Reason.MISMATCH


async def test_machine_lost_during_a_blob_outage_is_charged_while_listed(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker cannot decide yet whether the machine died or completed, so its attempt stays in training."""
    rig = build_rig(virtual=LONG)
    async with rig.running():
        job = await rig.submit()
        await rig.eventually(lambda: _is(rig, job, AttemptState.TRAINING))
        listings, listed = 0, rig.provider.list

        async def counted() -> Any:
            nonlocal listings
            found = await listed()
            listings += 1
            return found

        async def listed_twice() -> bool:
            return listings > 2  # the first may have begun while the machine ran

        with monkeypatch.context() as outage:
            _blobs_down(rig, outage)
            (machine,) = rig.body._instances.values()
            machine.dies_at = 0.0
            outage.setattr(rig.provider, "list", counted)
            await rig.eventually(listed_twice)
            await asyncio.sleep(0.5)
            back = rig.clock.now()
            assert await _is(rig, job, AttemptState.TRAINING)
        await rig.until(job, lambda found: found.attempts > 1)
        died = (await rig.attempts(job))[0]
        assert died.absent_at is not None
        assert died.absent_at <= back - timedelta(seconds=0.5)
        assert died.charged_usd == accrued(died, died.charged_to or back)
        await rig.stop(job)
        await rig.state_of(job, JobState.CANCELLED)


async def test_a_machine_seen_after_its_end_is_charged_once(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two brokers see the machine at every sweep, while its destroy has no effect. Another orphan cannot be destroyed
    at all.
    """
    rig = build_rig(virtual=SILENT)
    rig.limits = rig.limits.model_copy(update={"drain_s": 0.3})
    async with rig.running("one", "two"):
        job = await rig.submit(checkpoint=SAVE_RARELY)
        await rig.eventually(lambda: _is(rig, job, AttemptState.TRAINING))
        await _stop(rig, job)
        await rig.state_of(job, JobState.CANCELLED)
        (attempt,) = await rig.attempts(job)
        destroy = rig.provider.destroy
        stuck = instance_name(INSTALLATION, AttemptId("a" * 13))
        deaf = True

        async def destroys(handle: Handle) -> None:
            if handle.name == stuck:
                raise OutcomeUnknown("503")
            if not deaf:
                await destroy(handle)

        monkeypatch.setattr(rig.provider, "destroy", destroys)
        offer = rig.market.offers()[0]
        for name in (stuck, attempt.name):
            await rig.provider.create(name, offer, BootSpec(env={"GPUBROKER_ATTEMPT": attempt.id}))

        async def several() -> bool:
            return len([e for e in await rig.store.ledger(job) if e.kind is LedgerKind.ADJUSTMENT]) > 3

        await rig.eventually(several)  # what is asserted is a sum over time
        deaf = False
        await rig.eventually(lambda: _lists(rig, [stuck]))
    # No broker charges now: the last charge may come after the machine's end.
    late = [e.usd for e in await rig.store.ledger(job) if e.kind is LedgerKind.ADJUSTMENT]
    stored_job = await rig.store.job(job)
    (ended,) = await rig.attempts(job)
    assert stored_job is not None
    assert attempt.ended_at is not None
    lasted = (rig.clock.now() - attempt.ended_at).total_seconds()
    rate = attempt.line.offer.usd_per_hour / 3600
    assert 0 < sum(late) <= usd(rate * Decimal(lasted + 2))
    assert stored_job.spent_usd == ended.charged_usd == attempt.charged_usd + sum(late)


async def test_a_cap_too_small_to_checkpoint_in_buys_nothing(build_rig: RigBuilder) -> None:
    async with build_rig().running() as rig:
        l40s = {"spot": "never", "accelerators": ["l40s"]}
        price = min(o.usd_per_hour for o in rig.market.offers() if o.accelerator == "l40s" and not o.spot)
        job = await rig.submit(cap_usd=str(usd(price * 4 / 3600)), resources=l40s)  # boots, but a drain takes 2 s
        capped = await rig.state_of(job, JobState.CAPPED)
        assert capped.spent_usd == 0
        assert await rig.attempts(job) == []


async def test_slow_creates_in_all_slots_can_still_be_stopped(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = build_rig()
    rig.intervals = replace(rig.intervals, creates=1)
    answered = asyncio.Event()

    async def hangs(*_: Any) -> Any:
        await answered.wait()
        raise NoCapacity("at last")

    monkeypatch.setattr(rig.provider, "create", hangs)
    async with rig.running():
        job, waiting = await rig.submit(), await rig.submit()
        await rig.eventually(lambda: _is(rig, job, AttemptState.LAUNCHING, AttemptState.PLANNED))
        await rig.eventually(lambda: _is(rig, waiting, AttemptState.LAUNCHING, AttemptState.PLANNED))
        for one in (job, waiting):
            await _stop(rig, one)
        await rig.eventually(lambda: _is(rig, job, AttemptState.TERMINATING, AttemptState.ENDED))
        await rig.eventually(lambda: _is(rig, waiting, AttemptState.TERMINATING, AttemptState.ENDED))
        answered.set()
        for one in (job, waiting):
            await rig.state_of(one, JobState.CANCELLED)


async def test_a_submission_does_not_wait_for_the_next_poll(build_rig: RigBuilder) -> None:
    rig = build_rig()
    rig.intervals = replace(rig.intervals, poll_s=600)
    async with rig.running():
        await asyncio.sleep(0.5)  # the controllers have found nothing, and rest
        job = await rig.submit()
        await rig.until(job, lambda j: j.state is JobState.ACTIVE)


async def _stop(rig: BrokerRig, job: JobId) -> None:
    await rig.store.request_stop(job, Event(job_id=job, kind="job.stop_requested", message=""))


def _blobs_down(rig: BrokerRig, outage: pytest.MonkeyPatch) -> None:
    async def down(*_: Any, **__: Any) -> Any:
        raise BlobsUnavailable("down")

    for call in ("list", "get", "put", "delete"):
        outage.setattr(rig.blobs, call, down)


async def _is(rig: BrokerRig, job: JobId, *states: AttemptState) -> bool:
    return any(a.state in states for a in await rig.attempts(job))


async def _proven_absent(rig: BrokerRig, job: JobId) -> bool:
    return all(a.absent_at is not None for a in await rig.attempts(job))


async def _none_left(rig: BrokerRig) -> bool:
    return not await rig.machines()


async def _lists(rig: BrokerRig, names: list[str]) -> bool:
    return await rig.machines() == names


async def test_a_launcher_that_cannot_be_proven_dead_is_reported(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt does not end, because a machine may still be created, but the wait is reported."""
    monkeypatch.setattr("broker.lifecycle.decisions.termination_decision.STUCK_S", 0.1)
    rig = build_rig(virtual=LONG)

    async def unknown(launched_by: str, name: str) -> Liveness:
        return Liveness.UNKNOWN

    create = rig.provider.create

    async def mute(*asked: Any) -> Any:
        await create(*asked)
        raise OutcomeUnknown("the answer was lost")

    monkeypatch.setattr(rig.provider, "launcher", unknown)
    monkeypatch.setattr(rig.provider, "create", mute)
    async with rig.running():
        job = await rig.submit()

        async def trains() -> bool:
            return any(a.state is AttemptState.TRAINING for a in await rig.attempts(job))

        await rig.eventually(trains)
        await rig.store.request_stop(job, Event(job_id=job, kind="job.stop_requested", message="stop"))

        async def reported() -> bool:
            return any("cannot be proven dead" in e.message for e in await rig.events(job))

        await rig.eventually(reported)
        (attempt,) = await rig.attempts(job)
        assert attempt.state is AttemptState.TERMINATING


async def test_a_launcher_whose_create_has_answered_need_not_be_proven_dead(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launching broker's host, and with it every proof, may be lost although the machine exists.

    Launches are polled rarely, so that the answer of the create arrives before a listing shows its machine.
    """
    monkeypatch.setattr("broker.lifecycle.decisions.launch_decision.CREATE_POLL_S", 5.0)
    rig = build_rig(virtual=LONG)

    async def unknown(launched_by: str, name: str) -> Liveness:
        return Liveness.UNKNOWN

    monkeypatch.setattr(rig.provider, "launcher", unknown)
    async with rig.running():
        job = await rig.submit()

        async def trains() -> bool:
            return any(a.state is AttemptState.TRAINING for a in await rig.attempts(job))

        await rig.eventually(trains)
        await rig.stop(job)
        await rig.state_of(job, JobState.CANCELLED)
        assert await rig.machines() == []
