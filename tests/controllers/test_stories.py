"""Jobs from submit to their end, through the real controllers."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from itertools import count

import pytest

from broker.billing.accrual import accrued
from broker.controllers.fleet import Fleet
from broker.domain.ids import JobId, attempt_id, instance_name, job_id
from broker.domain.instance import BootSpec, InstanceState, Observed
from broker.domain.job import AttemptState, Event, JobState, Reason
from broker.domain.money import LedgerKind, usd
from broker.domain.tenancy import DEFAULT_TEAM, Tenant
from broker.quote.decision_record import unpacked
from providers.simulated.market import uniform_draw
from tests.support.rig.broker_rig import BOX, ENDLESS, INSTALLATION, SAVE_RARELY, SILENT, BrokerRig, RigBuilder, spent
from tests.support.rig.simulated_cloud import CloudFaults, SimulatedCloud
from trainer.contract import object_keys as keys


async def test_a_job_succeeds_and_its_ledger_is_closed(build_rig: RigBuilder) -> None:
    async with build_rig(virtual=ENDLESS).running() as rig:
        job = await rig.submit()
        done = await rig.completed(job)
        (attempt,) = await rig.attempts(job)
        assert (done.state, attempt.state, attempt.reason) == (
            JobState.SUCCEEDED, AttemptState.ENDED, Reason.COMPLETED,
        )  # fmt: skip
        assert await rig.machines() == []
        ledger = await rig.store.ledger(job)
        charged = sum((e.usd for e in ledger if e.kind is LedgerKind.CHARGE), Decimal(0))
        reserved = sum((e.usd for e in ledger if e.kind is LedgerKind.RESERVATION), Decimal(0))
        released = sum((e.usd for e in ledger if e.kind is LedgerKind.RELEASE), Decimal(0))
        assert 0 < charged == done.spent_usd == attempt.charged_usd
        assert reserved == charged + released
        document = await rig.store.decision(attempt.id)
        assert document is not None
        considered = unpacked(document)
        assert considered[0].offer == attempt.line.offer.id
        assert len(considered) > 1
        kinds = [e.kind for e in await rig.events(job)]
        assert kinds == [
            "attempt.planned", "attempt.booting", "attempt.training", "attempt.completed", "attempt.ended",
            "job.succeeded",
        ]  # fmt: skip


async def test_a_preempted_job_resumes_from_its_last_checkpoint(build_rig: RigBuilder) -> None:
    async with build_rig(virtual=ENDLESS).running() as rig:
        job = await rig.submit(resources={"spot": "only"}, retry={"max": 50})

        async def saved() -> bool:
            return any(attempt.beat and attempt.beat.checkpoint for attempt in await rig.attempts(job))

        await rig.eventually(saved)
        (machine,) = rig.body._instances.values()
        machine.dies_at = 0.0
        await rig.until(job, lambda found: found.attempts > 1)
        await rig.completed(job)
        first, last = await rig.attempts(job)
        assert (first.reason, last.reason) == (Reason.PREEMPTED, Reason.COMPLETED)
        assert first.ended_at is not None
        assert first.ended_at <= last.created_at
        assert last.resume_from
        assert all(key.startswith(keys.checkpoints(job) + first.id) for key in last.resume_from[-1:])


async def test_a_stop_of_a_queued_job_costs_nothing(build_rig: RigBuilder) -> None:
    async with build_rig().running() as rig:
        job = await rig.submit(resources={"accelerators": ["b200"]})
        await rig.until(job, lambda j: bool(j.reason))
        await _stop(rig, job)
        done = await rig.state_of(job, JobState.CANCELLED)
        assert done.spent_usd == 0
        assert await rig.attempts(job) == []


async def test_a_stop_of_a_training_job_checkpoints_first(build_rig: RigBuilder) -> None:
    rig = build_rig(virtual={"run_s": 3600, "boot_s": 0.05, "beat_s": 0.1, "tick_s": 0.02})
    rig.limits = rig.limits.model_copy(update={"drain_s": 3600})
    async with rig.running():
        job = await rig.submit()
        await _training(rig, job)
        await _stop(rig, job)
        await rig.state_of(job, JobState.CANCELLED)
        (attempt,) = await rig.attempts(job)
        assert attempt.reason is Reason.STOPPED
        assert [b for b in await rig.blobs.list(keys.checkpoints(job)) if b.key.endswith(keys.MANIFEST)]
        assert await rig.machines() == []


async def test_a_trainer_that_ignores_the_drain_is_ended_after_drain_s(build_rig: RigBuilder) -> None:
    rig = build_rig(virtual=SILENT)
    rig.limits = rig.limits.model_copy(update={"drain_s": 0.3})
    async with rig.running():
        job = await rig.submit(checkpoint=SAVE_RARELY)
        await _training(rig, job)
        await _stop(rig, job)
        await rig.state_of(job, JobState.CANCELLED)
        assert await rig.machines() == []


async def test_the_cap_holds_and_a_raised_cap_resumes(build_rig: RigBuilder) -> None:
    market = {"virtual": {"run_s": 20, "boot_s": 0.05, "beat_s": 0.1, "tick_s": 0.02}}
    rig = build_rig(**market)
    # Both times are part of the lead before the cap, so that the cap also holds if the database pauses.
    rig.limits = rig.limits.model_copy(update={"drain_s": 8})
    rig.intervals = replace(rig.intervals, look_s=1.0)
    async with rig.running():
        l40s = {"spot": "never", "accelerators": ["l40s"]}
        price = min(o.usd_per_hour for o in rig.market.offers() if o.accelerator == "l40s" and not o.spot)
        cap = usd(price * 22 / 3600)
        job = await rig.submit(cap_usd=str(cap), resources=l40s)
        capped = await rig.state_of(job, JobState.CAPPED)
        assert capped.spent_usd <= capped.cap_usd
        await rig.store.raise_cap(job, Decimal(5), _event(job, "job.cap_raised"))
        done = await rig.state_of(job, JobState.SUCCEEDED)
        assert done.spent_usd <= done.cap_usd
        assert done.spent_usd == spent(await rig.attempts(job))


@pytest.mark.parametrize("fault", ["lost_reply", "lying_timeout"])
async def test_an_unknown_create_is_looked_up_and_never_bought_twice(build_rig: RigBuilder, fault: str) -> None:
    """Creates lose their reply, or happen only after their time-out. Each job has one attempt; no machine is left."""
    faults = {fault: 0.7, "lying_delay_s": 0.3, "list_lag_s": 0.2}
    async with build_rig(faults=faults).running() as rig:
        jobs = [await rig.submit() for _ in range(8)]
        for job in jobs:
            await rig.state_of(job, JobState.SUCCEEDED)
            assert [a.reason for a in await rig.attempts(job)] == [Reason.COMPLETED]
        assert await rig.machines() == []


class CountsEmptyListings(SimulatedCloud):
    """Simulated cloud that counts the listings since the last one that showed a machine."""

    empty_listings = 0

    async def list(self) -> Sequence[Observed]:
        listed = await super().list()
        has_machines = any(machine.state is not InstanceState.GONE for machine in listed)
        self.empty_listings = 0 if has_machines else self.empty_listings + 1
        return listed


async def test_the_time_that_listings_lag_is_not_charged(build_rig: RigBuilder) -> None:
    """Charges end at the first listing without the machine, although the proof takes one list lag longer."""
    lag_s = 100.0
    rig = build_rig(CountsEmptyListings, cloud_faults=CloudFaults(caps={"list_lag_s": lag_s}), virtual=ENDLESS)
    cloud, job = rig.provider, await rig.submit()
    assert isinstance(cloud, CountsEmptyListings)

    async def listed_without() -> bool:
        return cloud.empty_listings > 3

    async def ended() -> bool:
        rig.clock.forward(5)  # often, because the proof may begin at a later listing than the last one above
        return all(attempt.state is AttemptState.ENDED for attempt in await rig.attempts(job))

    async with rig.running():
        await _training(rig, job)
        rig.clock.forward(lag_s)  # after this, no listing omits the machine only because it is new
        rig.finish()
        await rig.eventually(listed_without)
        assert [attempt.state for attempt in await rig.attempts(job)] == [AttemptState.TERMINATING]
        await rig.eventually(ended)
        done = await rig.state_of(job, JobState.SUCCEEDED)
        (attempt,) = await rig.attempts(job)
        assert attempt.absent_at is not None
        assert attempt.ended_at is not None
        assert (attempt.ended_at - attempt.absent_at).total_seconds() >= lag_s
        # Every charge moves its fence by a microsecond at least, also one that covers no time.
        assert attempt.charged_to is not None
        assert timedelta(0) <= attempt.charged_to - attempt.absent_at < timedelta(milliseconds=1)
        assert done.spent_usd == attempt.charged_usd == accrued(attempt, attempt.charged_to)
        assert attempt.charged_usd < accrued(attempt, attempt.ended_at)


async def test_a_wrong_machine_is_destroyed_and_replaced(build_rig: RigBuilder) -> None:
    async with build_rig(faults={"wrong_machine": 0.5}, virtual=ENDLESS).running() as rig:
        job = await rig.submit(id=_first_is_wrong(rig, 0.5))
        await rig.completed(job)
        assert [a.reason for a in await rig.attempts(job)] == [Reason.MISMATCH, Reason.COMPLETED]
        assert await rig.machines() == []


def _first_is_wrong(rig: BrokerRig, share: float) -> JobId:
    """Return a job id whose first machine mismatches and whose second does not; machine names determine the faults."""

    def wrong(job: JobId, number: int) -> bool:
        name = instance_name(INSTALLATION, attempt_id(job, number))
        return uniform_draw(rig.config.seed, "wrong machine", name) < share

    jobs = (job_id(n.to_bytes(9)) for n in count())
    return next(job for job in jobs if wrong(job, 1) and not wrong(job, 2))


async def test_a_flaky_cloud_only_takes_longer(build_rig: RigBuilder) -> None:
    faults = {"throttled": 0.2, "server_error": 0.2, "no_capacity": 0.2}
    async with build_rig(faults=faults).running() as rig:
        jobs = [await rig.submit(retry={"max": 50}) for _ in range(10)]
        for job in jobs:
            await rig.state_of(job, JobState.SUCCEEDED)
        assert await rig.machines() == []


async def test_two_brokers_share_the_work_and_buy_each_job_once(build_rig: RigBuilder) -> None:
    async with build_rig().running("one", "two") as rig:
        jobs = [await rig.submit() for _ in range(30)]
        for job in jobs:
            await rig.state_of(job, JobState.SUCCEEDED)
            assert len(await rig.attempts(job)) == 1
        assert await rig.machines() == []


async def test_a_broker_that_dies_between_intent_and_reply_leaves_nothing_behind(build_rig: RigBuilder) -> None:
    """Six brokers are cancelled at different moments; the next one finds all machines and ends every job."""
    rig = build_rig(virtual={"run_s": 0.3, "boot_s": 0.02, "beat_s": 0.1, "tick_s": 0.01})
    jobs = [await rig.submit() for _ in range(10)]
    for life in range(6):
        await rig.market.step()
        dying = asyncio.create_task(rig.fleet(f"mortal-{life}").run())
        await asyncio.wait([dying], timeout=0.01 + 0.07 * life)
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)
    async with rig.running("survivor"):
        for job in jobs:
            await rig.state_of(job, JobState.SUCCEEDED)
        assert await rig.machines() == []


async def test_the_sweep_destroys_a_machine_without_an_attempt(build_rig: RigBuilder) -> None:
    """The machine exists before any broker starts, and its agent does not end it."""
    rig = build_rig(virtual={"boot_s": 1e6, "tick_s": 0.02})
    await rig.market.step()
    stray = instance_name(INSTALLATION, attempt_id(await rig.submit(resources={"gpus": 64}), 99))
    await rig.provider.create(stray, rig.market.offers()[0], BootSpec(env={"GPUBROKER_ATTEMPT": "x"}))
    assert await rig.machines() == [stray]
    async with rig.running():
        await rig.eventually(lambda: _none_left(rig))


@pytest.mark.parametrize(
    ("sealed", "fix"),
    [(None, "gpubroker secret set HF_TOKEN"), (b"by another key", "secret HF_TOKEN: .* restore the key file")],
)
async def test_unavailable_secret_fails_its_job_at_once(build_rig: RigBuilder, sealed: bytes | None, fix: str) -> None:
    """Nothing is bought, no other cloud is tried, and the offer is not blocked for other jobs."""
    async with build_rig().running() as rig:
        if sealed is not None:
            await rig.store.as_tenant(Tenant(team=DEFAULT_TEAM, owner="me")).put_secret("me", "HF_TOKEN", sealed)
        job = await rig.submit(secrets=["HF_TOKEN"])
        done = await rig.state_of(job, JobState.FAILED)
        assert re.search(fix, done.reason), done.reason
        assert (done.reason.count("\n"), done.attempts, done.spent_usd) == (0, 1, Decimal(0))
        assert not await rig.store.blocked_offers()


async def _training(rig: BrokerRig, job: JobId) -> None:
    async def trains() -> bool:
        return any(a.state is AttemptState.TRAINING for a in await rig.attempts(job))

    await rig.eventually(trains)


async def _none_left(rig: BrokerRig) -> bool:
    return not await rig.machines()


def _event(job: JobId, kind: str) -> Event:
    return Event(job_id=job, kind=kind, message=kind)


async def _stop(rig: BrokerRig, job: JobId) -> None:
    await rig.store.request_stop(job, _event(job, "job.stop_requested"))


async def test_attempts_in_a_cloud_that_a_broker_lacks_are_left_to_others(
    build_rig: RigBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker that started during an outage of the blob store may lack a cloud. If it claimed rows of that cloud,
    no broker would advance them.
    """
    rig = build_rig(virtual=ENDLESS)
    async with rig.running():
        job = await rig.submit()

        async def beats() -> bool:
            return any(attempt.beat is not None for attempt in await rig.attempts(job))

        await rig.eventually(beats)
        context = replace(rig.fleet("other").context, providers={})
        other = Fleet.build(context, BOX, list, ())
        by_name = {controller.name: controller for controller in other.controllers}
        for _ in range(20):
            for name in ("launch", "liveness", "interruption", "termination", "billing", "guard"):
                assert not await by_name[name].step()
        assert "cannot be charged" not in caplog.text
        await rig.completed(job)
        assert [a.reason for a in await rig.attempts(job)] == [Reason.COMPLETED]
