"""One bad row, one bad machine, one dead room of the house: everybody else's jobs go on, and money stays counted."""

import asyncio
from collections.abc import Callable
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
from tests.controllers.house import INSTALLATION, SAVE_RARELY, SILENT, House
from trainer.contract import object_keys as keys

Build = Callable[..., House]
LONG = {"run_s": 3600, "boot_s": 0.05, "beat_s": 0.1, "tick_s": 0.02}


async def test_a_beat_full_of_nonsense_harms_no_other_job(house: Build) -> None:
    async with house().running() as broker:
        bad = await broker.submit()
        key = keys.heartbeat(attempt_id(bad, 1), 0)
        saved = b'{"manifest": "m", "step": 1, "save_s": NaN}'
        await broker.blobs.put(key, b'{"attempt": "a", "boot": "b", "seq": 1, "checkpoint": ' + saved + b"}")
        await broker.state_of(bad, JobState.SUCCEEDED)
        await broker.state_of(await broker.submit(), JobState.SUCCEEDED)


async def test_a_manifest_at_a_nonsense_key_harms_no_job(house: Build) -> None:
    async with house().running() as broker:
        origin = await broker.submit()
        await broker.state_of(origin, JobState.SUCCEEDED)
        await broker.blobs.put(f"checkpoints/{origin}/x/nonsense/manifest.json", b"{}")
        heir = await broker.submit(init_from=f"job/{origin}")
        await broker.state_of(heir, JobState.SUCCEEDED)
        (attempt,) = await broker.attempts(heir)
        assert attempt.resume_from
        assert not any("nonsense" in key for key in attempt.resume_from)


async def test_a_refusal_that_takes_long_is_still_a_refusal(house: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The create is looked up meanwhile, which must not make its late answer void."""
    monkeypatch.setattr("broker.lifecycle.decisions.launch_decision.CREATE_POLL_S", 0.02)
    broker = house()
    create, calls = broker.provider.create, []

    async def slow(*asked: Any) -> Any:
        calls.append(asked)
        await asyncio.sleep(0.3)
        if len(calls) == 1:
            raise NoCapacity("sold out")
        return await create(*asked)

    monkeypatch.setattr(broker.provider, "create", slow)
    async with broker.running():
        job = await broker.submit()
        await broker.state_of(job, JobState.SUCCEEDED)
        assert [a.reason for a in await broker.attempts(job)] == [Reason.NO_CAPACITY, Reason.COMPLETED]
        assert len(calls) == 2


async def test_a_machine_whose_destroy_breaks_keeps_nobody_elses(house: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = house(virtual=SILENT)  # a drain is not heard, so that every machine stands until destroyed
    broker.limits = broker.limits.model_copy(update={"drain_s": 0.3})
    async with broker.running():
        bad = await broker.submit(checkpoint=SAVE_RARELY)
        destroy, name = broker.provider.destroy, instance_name(INSTALLATION, attempt_id(bad, 1))

        async def broken(handle: Handle) -> None:
            if handle.name == name:
                raise RuntimeError("a bug in the provider")
            await destroy(handle)

        monkeypatch.setattr(broker.provider, "destroy", broken)
        others = [await broker.submit(checkpoint=SAVE_RARELY) for _ in range(3)]
        for job in (bad, *others):
            await broker.eventually(lambda job=job: _is(broker, job, AttemptState.TRAINING))  # type: ignore[misc]
            await _stop(broker, job)
        for job in others:
            await broker.state_of(job, JobState.CANCELLED)
        assert await broker.machines() == [name]


async def test_a_draining_machine_is_ended_also_while_the_blob_store_is_down(
    house: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = house(virtual=LONG)
    broker.limits = broker.limits.model_copy(update={"drain_s": 0.5})
    async with broker.running():
        job = await broker.submit()
        await broker.eventually(lambda: _is(broker, job, AttemptState.TRAINING))

        with monkeypatch.context() as outage:
            _blobs_down(broker, outage)
            await _stop(broker, job)
            await broker.eventually(lambda: _none_left(broker))
            await broker.eventually(lambda: _proven_absent(broker, job))
        await broker.state_of(job, JobState.CANCELLED)
        (attempt,) = await broker.attempts(job)
        assert attempt.absent_at is not None
        assert attempt.charged_to is not None
        # Every charge moves its fence by a microsecond at least, also one that covers no time.
        assert timedelta(0) <= attempt.charged_to - attempt.absent_at < timedelta(milliseconds=1)
        assert attempt.charged_usd == accrued(attempt, attempt.charged_to)


async def test_a_proven_absence_outlives_the_proof_of_whoever_made_it(
    house: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blob store keeps it from being settled, and a broker whose cloud is silent has no proof of its own: the money
    stops all the same."""
    broker = house(virtual=LONG)
    broker.limits = broker.limits.model_copy(update={"drain_s": 0.5})
    async with broker.running():
        job = await broker.submit()
        await broker.eventually(lambda: _is(broker, job, AttemptState.TRAINING))

        async def silent() -> Any:
            raise OutcomeUnknown("no answer")

        with monkeypatch.context() as outage:
            _blobs_down(broker, outage)
            await _stop(broker, job)
            await broker.eventually(lambda: _proven_absent(broker, job))
            outage.setattr(broker.provider, "list", silent)
            (proven,) = await broker.attempts(job)

            async def looked_at_again() -> bool:
                return (await broker.attempts(job))[0].epoch >= proven.epoch + 3

            await broker.eventually(looked_at_again)
            assert [a.absent_at for a in await broker.attempts(job)] == [proven.absent_at]
        await broker.state_of(job, JobState.CANCELLED)
        assert [a.absent_at for a in await broker.attempts(job)] == [proven.absent_at]


async def test_a_wrong_machine_is_ended_also_while_the_blob_store_is_down(
    house: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = house(virtual=LONG | {"boot_s": 3600})
    async with broker.running():
        job = await broker.submit()
        await broker.eventually(lambda: _is(broker, job, AttemptState.BOOTING))
        listed = broker.provider.list

        async def wrong() -> Any:
            return [replace(machine, accelerator="t4") for machine in await listed()]

        with monkeypatch.context() as outage:
            _blobs_down(broker, outage)
            outage.setattr(broker.provider, "list", wrong)
            await broker.eventually(lambda: _proven_absent(broker, job))
        await broker.eventually(lambda: _is(broker, job, AttemptState.ENDED))
        assert (await broker.attempts(job))[0].reason is Reason.MISMATCH


async def test_machine_lost_during_a_blob_outage_is_charged_while_listed(
    house: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it died or had ended cannot be told by then, so its attempt trains on."""
    broker = house(virtual=LONG)
    async with broker.running():
        job = await broker.submit()
        await broker.eventually(lambda: _is(broker, job, AttemptState.TRAINING))
        listings, listed = 0, broker.provider.list

        async def counted() -> Any:
            nonlocal listings
            found = await listed()
            listings += 1
            return found

        async def listed_twice() -> bool:
            return listings > 2  # the first may have begun while it stood

        with monkeypatch.context() as outage:
            _blobs_down(broker, outage)
            (machine,) = broker.body._instances.values()
            machine.dies_at = 0.0
            outage.setattr(broker.provider, "list", counted)
            await broker.eventually(listed_twice)
            await asyncio.sleep(0.5)
            back = broker.clock.now()
            assert await _is(broker, job, AttemptState.TRAINING)
        await broker.until(job, lambda found: found.attempts > 1)
        died = (await broker.attempts(job))[0]
        assert died.absent_at is not None
        assert died.absent_at <= back - timedelta(seconds=0.5)
        assert died.charged_usd == accrued(died, died.charged_to or back)
        await broker.stop(job)
        await broker.state_of(job, JobState.CANCELLED)


async def test_a_machine_seen_after_its_end_is_charged_once(house: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """By two brokers, at every sweep, while its destroy has no effect; another orphan cannot be destroyed at all."""
    broker = house(virtual=SILENT)
    broker.limits = broker.limits.model_copy(update={"drain_s": 0.3})
    async with broker.running("one", "two"):
        job = await broker.submit(checkpoint=SAVE_RARELY)
        await broker.eventually(lambda: _is(broker, job, AttemptState.TRAINING))
        await _stop(broker, job)
        await broker.state_of(job, JobState.CANCELLED)
        (attempt,) = await broker.attempts(job)
        destroy = broker.provider.destroy
        stuck = instance_name(INSTALLATION, AttemptId("a" * 13))
        deaf = True

        async def destroys(handle: Handle) -> None:
            if handle.name == stuck:
                raise OutcomeUnknown("503")
            if not deaf:
                await destroy(handle)

        monkeypatch.setattr(broker.provider, "destroy", destroys)
        offer = broker.market.offers()[0]
        for name in (stuck, attempt.name):
            await broker.provider.create(name, offer, BootSpec(env={"GPUBROKER_ATTEMPT": attempt.id}))

        async def several() -> bool:
            return len([e for e in await broker.store.ledger(job) if e.kind is LedgerKind.ADJUSTMENT]) > 3

        await broker.eventually(several)  # what is asserted is a sum over time
        deaf = False
        await broker.eventually(lambda: _lists(broker, [stuck]))
    # Nobody charges any more: the last charge may come after the machine's end.
    late = [e.usd for e in await broker.store.ledger(job) if e.kind is LedgerKind.ADJUSTMENT]
    found = await broker.store.job(job)
    (ended,) = await broker.attempts(job)
    assert found is not None
    assert attempt.ended_at is not None
    lasted = (broker.clock.now() - attempt.ended_at).total_seconds()
    rate = attempt.line.offer.usd_per_hour / 3600
    assert 0 < sum(late) <= usd(rate * Decimal(lasted + 2))
    assert found.spent_usd == ended.charged_usd == attempt.charged_usd + sum(late)


async def test_a_cap_too_small_to_checkpoint_in_buys_nothing(house: Build) -> None:
    async with house().running() as broker:
        l40s = {"spot": "never", "accelerators": ["l40s"]}
        price = min(o.usd_per_hour for o in broker.market.offers() if o.accelerator == "l40s" and not o.spot)
        job = await broker.submit(cap_usd=str(usd(price * 4 / 3600)), resources=l40s)  # boots, but a drain takes 2 s
        capped = await broker.state_of(job, JobState.CAPPED)
        assert capped.spent_usd == 0
        assert await broker.attempts(job) == []


async def test_a_full_house_of_slow_creates_can_still_be_stopped(house: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = house()
    broker.intervals = replace(broker.intervals, creates=1)
    answered = asyncio.Event()

    async def hangs(*_: Any) -> Any:
        await answered.wait()
        raise NoCapacity("at last")

    monkeypatch.setattr(broker.provider, "create", hangs)
    async with broker.running():
        job, waiting = await broker.submit(), await broker.submit()
        await broker.eventually(lambda: _is(broker, job, AttemptState.LAUNCHING, AttemptState.PLANNED))
        await broker.eventually(lambda: _is(broker, waiting, AttemptState.LAUNCHING, AttemptState.PLANNED))
        for one in (job, waiting):
            await _stop(broker, one)
        await broker.eventually(lambda: _is(broker, job, AttemptState.TERMINATING, AttemptState.ENDED))
        await broker.eventually(lambda: _is(broker, waiting, AttemptState.TERMINATING, AttemptState.ENDED))
        answered.set()
        for one in (job, waiting):
            await broker.state_of(one, JobState.CANCELLED)


async def test_a_submission_does_not_wait_for_the_next_poll(house: Build) -> None:
    broker = house()
    broker.intervals = replace(broker.intervals, poll_s=600)
    async with broker.running():
        await asyncio.sleep(0.5)  # the controllers have found nothing, and rest
        job = await broker.submit()
        await broker.until(job, lambda j: j.state is JobState.ACTIVE)


async def _stop(broker: House, job: JobId) -> None:
    await broker.store.request_stop(job, Event(job_id=job, kind="job.stop_requested", message=""))


def _blobs_down(broker: House, outage: pytest.MonkeyPatch) -> None:
    async def down(*_: Any, **__: Any) -> Any:
        raise BlobsUnavailable("down")

    for call in ("list", "get", "put", "delete"):
        outage.setattr(broker.blobs, call, down)


async def _is(broker: House, job: JobId, *states: AttemptState) -> bool:
    return any(a.state in states for a in await broker.attempts(job))


async def _proven_absent(broker: House, job: JobId) -> bool:
    return all(a.absent_at is not None for a in await broker.attempts(job))


async def _none_left(broker: House) -> bool:
    return not await broker.machines()


async def _lists(broker: House, names: list[str]) -> bool:
    return await broker.machines() == names


async def test_people_hear_of_a_launcher_that_cannot_be_proven_dead(
    house: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt does not end, since a machine may still come; but it does not wait in silence either."""
    monkeypatch.setattr("broker.lifecycle.decisions.termination_decision.STUCK_S", 0.1)
    broker = house(virtual=LONG)

    async def unknown(launched_by: str, name: str) -> Liveness:
        return Liveness.UNKNOWN

    create = broker.provider.create

    async def mute(*asked: Any) -> Any:
        await create(*asked)
        raise OutcomeUnknown("the answer was lost")

    monkeypatch.setattr(broker.provider, "launcher", unknown)
    monkeypatch.setattr(broker.provider, "create", mute)
    monkeypatch.setattr("broker.lifecycle.decisions.launch_decision.CREATE_POLL_S", 0.02)
    async with broker.running():
        job = await broker.submit()

        async def trains() -> bool:
            return any(a.state is AttemptState.TRAINING for a in await broker.attempts(job))

        await broker.eventually(trains)
        await broker.store.request_stop(job, Event(job_id=job, kind="job.stop_requested", message="stop"))

        async def told() -> bool:
            return any("cannot be proven dead" in e.message for e in await broker.events(job))

        await broker.eventually(told)
        (attempt,) = await broker.attempts(job)
        assert attempt.state is AttemptState.TERMINATING


async def test_a_launcher_whose_create_has_answered_need_not_be_proven_dead(
    house: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host of the broker that launched may be lost, and with it every proof; the machine is not."""
    broker = house(virtual=LONG)

    async def unknown(launched_by: str, name: str) -> Liveness:
        return Liveness.UNKNOWN

    monkeypatch.setattr(broker.provider, "launcher", unknown)
    async with broker.running():
        job = await broker.submit()

        async def trains() -> bool:
            return any(a.state is AttemptState.TRAINING for a in await broker.attempts(job))

        await broker.eventually(trains)
        await broker.stop(job)
        await broker.state_of(job, JobState.CANCELLED)
        assert await broker.machines() == []
