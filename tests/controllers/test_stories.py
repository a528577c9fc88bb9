"""Whole lives of jobs through the real controllers."""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import count

import pytest

from broker.billing.accrual import accrued
from broker.controllers.fleet import Fleet
from broker.domain.ids import JobId, attempt_id, instance_name, job_id
from broker.domain.instance import BootSpec, Caps, InstanceState, Observed
from broker.domain.job import AttemptState, Event, JobState, Reason
from broker.domain.money import LedgerKind, usd
from broker.domain.tenancy import DEFAULT_TEAM, Tenant
from broker.quote.decision_record import unpacked
from providers.simulated.market import unit
from providers.simulated.provider import SimulatedProvider
from tests.controllers.house import BOX, ENDLESS, INSTALLATION, SAVE_RARELY, SILENT, House, spent
from trainer.contract import object_keys as keys

Build = Callable[..., House]


async def test_a_job_succeeds_and_everything_is_settled(house: Build) -> None:
    async with house(virtual=ENDLESS).running() as broker:
        job = await broker.submit()
        done = await broker.completed(job)
        (attempt,) = await broker.attempts(job)
        assert (done.state, attempt.state, attempt.reason) == (
            JobState.SUCCEEDED, AttemptState.ENDED, Reason.COMPLETED,
        )  # fmt: skip
        assert await broker.machines() == []
        ledger = await broker.store.ledger(job)
        charged = sum((e.usd for e in ledger if e.kind is LedgerKind.CHARGE), Decimal(0))
        reserved = sum((e.usd for e in ledger if e.kind is LedgerKind.RESERVATION), Decimal(0))
        released = sum((e.usd for e in ledger if e.kind is LedgerKind.RELEASE), Decimal(0))
        assert 0 < charged == done.spent_usd == attempt.charged_usd
        assert reserved == charged + released
        document = await broker.store.decision(attempt.id)
        assert document is not None
        considered = unpacked(document)
        assert considered[0].offer == attempt.line.offer.id
        assert len(considered) > 1
        kinds = [e.kind for e in await broker.events(job)]
        assert kinds == [
            "attempt.planned", "attempt.booting", "attempt.training", "attempt.completed", "attempt.ended",
            "job.succeeded",
        ]  # fmt: skip


async def test_a_preempted_job_resumes_from_its_last_checkpoint(house: Build) -> None:
    async with house(virtual=ENDLESS).running() as broker:
        job = await broker.submit(resources={"spot": "only"}, retry={"max": 50})

        async def saved() -> bool:
            return any(one.beat and one.beat.checkpoint for one in await broker.attempts(job))

        await broker.eventually(saved)
        (machine,) = broker.body._instances.values()
        machine.dies_at = 0.0
        await broker.until(job, lambda found: found.attempts > 1)
        await broker.completed(job)
        first, last = await broker.attempts(job)
        assert (first.reason, last.reason) == (Reason.PREEMPTED, Reason.COMPLETED)
        assert first.ended_at is not None
        assert first.ended_at <= last.created_at
        assert last.resume_from
        assert all(key.startswith(keys.checkpoints(job) + first.id) for key in last.resume_from[-1:])


async def test_a_stop_of_a_queued_job_costs_nothing(house: Build) -> None:
    async with house().running() as broker:
        job = await broker.submit(resources={"accelerators": ["b200"]})
        await broker.until(job, lambda j: bool(j.reason))
        await _stop(broker, job)
        done = await broker.state_of(job, JobState.CANCELLED)
        assert done.spent_usd == 0
        assert await broker.attempts(job) == []


async def test_a_stop_of_a_training_job_checkpoints_first(house: Build) -> None:
    broker = house(virtual={"run_s": 3600, "boot_s": 0.05, "beat_s": 0.1, "tick_s": 0.02})
    broker.limits = broker.limits.model_copy(update={"drain_s": 3600})
    async with broker.running():
        job = await broker.submit()
        await _training(broker, job)
        await _stop(broker, job)
        await broker.state_of(job, JobState.CANCELLED)
        (attempt,) = await broker.attempts(job)
        assert attempt.reason is Reason.STOPPED
        assert [b for b in await broker.blobs.list(keys.checkpoints(job)) if b.key.endswith(keys.MANIFEST)]
        assert await broker.machines() == []


async def test_a_trainer_that_ignores_the_drain_is_ended_when_the_grace_is_over(house: Build) -> None:
    broker = house(virtual=SILENT)
    broker.limits = broker.limits.model_copy(update={"drain_s": 0.3})
    async with broker.running():
        job = await broker.submit(checkpoint=SAVE_RARELY)
        await _training(broker, job)
        await _stop(broker, job)
        await broker.state_of(job, JobState.CANCELLED)
        assert await broker.machines() == []


async def test_the_cap_holds_and_a_raised_cap_resumes(house: Build) -> None:
    market = {"virtual": {"run_s": 20, "boot_s": 0.05, "beat_s": 0.1, "tick_s": 0.02}}
    broker = house(**market)
    # Both are kept for the end, and taken by nobody: for a database that stands still.
    broker.limits = broker.limits.model_copy(update={"drain_s": 8})
    broker.intervals = replace(broker.intervals, look_s=1.0)
    async with broker.running():
        l40s = {"spot": "never", "accelerators": ["l40s"]}
        price = min(o.usd_per_hour for o in broker.market.offers() if o.accelerator == "l40s" and not o.spot)
        cap = usd(price * 22 / 3600)
        job = await broker.submit(cap_usd=str(cap), resources=l40s)
        capped = await broker.state_of(job, JobState.CAPPED)
        assert capped.spent_usd <= capped.cap_usd
        await broker.store.raise_cap(job, Decimal(5), _event(job, "job.cap_raised"))
        done = await broker.state_of(job, JobState.SUCCEEDED)
        assert done.spent_usd <= done.cap_usd
        assert done.spent_usd == spent(await broker.attempts(job))


@pytest.mark.parametrize("fault", ["lost_reply", "lying_timeout"])
async def test_an_unknown_create_is_looked_up_and_never_bought_twice(house: Build, fault: str) -> None:
    """Some creates lose their reply, some happen only after their time-out: one attempt each, nothing left over."""
    faults = {fault: 0.7, "lying_delay_s": 0.3, "list_lag_s": 0.2}
    async with house(faults=faults).running() as broker:
        jobs = [await broker.submit() for _ in range(8)]
        for job in jobs:
            await broker.state_of(job, JobState.SUCCEEDED)
            assert [a.reason for a in await broker.attempts(job)] == [Reason.COMPLETED]
        assert await broker.machines() == []


class Lagging(SimulatedProvider):
    """What it lists is true, but a broker must not rely on that for `LAG_S`."""

    LAG_S = 100.0
    without = 0
    """Listings since the last that showed a machine."""

    @property
    def caps(self) -> Caps:
        return replace(super().caps, list_lag_s=self.LAG_S)

    async def list(self) -> Sequence[Observed]:
        listed = await super().list()
        stands = any(machine.state is not InstanceState.GONE for machine in listed)
        self.without = 0 if stands else self.without + 1
        return listed


async def test_the_time_that_listings_lag_is_not_charged(house: Build) -> None:
    """A destroyed machine is absent once a listing does not show it, though the proof takes a whole lag longer."""
    broker = house(Lagging, virtual=ENDLESS)
    cloud, job = broker.provider, await broker.submit()
    assert isinstance(cloud, Lagging)

    async def listed_without() -> bool:
        return cloud.without > 3

    async with broker.running():
        await _training(broker, job)
        broker.clock.forward(cloud.LAG_S)  # no listing leaves it out because it is young
        broker.finish()
        await broker.eventually(listed_without)
        assert [attempt.state for attempt in await broker.attempts(job)] == [AttemptState.TERMINATING]
        broker.clock.forward(cloud.LAG_S)
        done = await broker.state_of(job, JobState.SUCCEEDED)
        (attempt,) = await broker.attempts(job)
        assert attempt.absent_at is not None
        assert attempt.ended_at is not None
        assert (attempt.ended_at - attempt.absent_at).total_seconds() >= cloud.LAG_S
        assert attempt.charged_to == attempt.absent_at
        assert done.spent_usd == attempt.charged_usd == accrued(attempt, attempt.absent_at)
        assert attempt.charged_usd < accrued(attempt, attempt.ended_at)


async def test_a_wrong_machine_is_given_back(house: Build) -> None:
    async with house(faults={"wrong_machine": 0.5}).running() as broker:
        job = await broker.submit(id=_first_is_wrong(broker, 0.5))
        await broker.state_of(job, JobState.SUCCEEDED)
        assert [a.reason for a in await broker.attempts(job)] == [Reason.MISMATCH, Reason.COMPLETED]
        assert await broker.machines() == []


def _first_is_wrong(broker: House, share: float) -> JobId:
    """A job whose first machine is a wrong one and whose second is not: the names decide."""

    def wrong(job: JobId, number: int) -> bool:
        name = instance_name(INSTALLATION, attempt_id(job, number))
        return unit(broker.config.seed, "wrong machine", name) < share

    jobs = (job_id(n.to_bytes(9)) for n in count())
    return next(job for job in jobs if wrong(job, 1) and not wrong(job, 2))


async def test_a_flaky_cloud_only_takes_longer(house: Build) -> None:
    faults = {"throttled": 0.2, "server_error": 0.2, "no_capacity": 0.2}
    async with house(faults=faults).running() as broker:
        jobs = [await broker.submit(retry={"max": 50}) for _ in range(10)]
        for job in jobs:
            await broker.state_of(job, JobState.SUCCEEDED)
        assert await broker.machines() == []


async def test_two_brokers_share_the_work_and_buy_each_job_once(house: Build) -> None:
    async with house().running("one", "two") as broker:
        jobs = [await broker.submit() for _ in range(30)]
        for job in jobs:
            await broker.state_of(job, JobState.SUCCEEDED)
            assert len(await broker.attempts(job)) == 1
        assert await broker.machines() == []


async def test_a_broker_that_dies_between_intent_and_reply_leaves_nothing_behind(house: Build) -> None:
    """Cancelled at a random moment, again and again; the next one finds what was bought and ends every job."""
    broker = house(virtual={"run_s": 0.3, "boot_s": 0.02, "beat_s": 0.1, "tick_s": 0.01})
    jobs = [await broker.submit() for _ in range(10)]
    for life in range(6):
        await broker.market.step()
        dying = asyncio.create_task(broker.fleet(f"mortal-{life}").run())
        await asyncio.wait([dying], timeout=0.01 + 0.07 * life)
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)
    async with broker.running("survivor"):
        for job in jobs:
            await broker.state_of(job, JobState.SUCCEEDED)
        assert await broker.machines() == []


async def test_the_sweep_destroys_what_nobody_answers_for(house: Build) -> None:
    """It stands there before any broker does, and ends by no agent of its own."""
    broker = house(virtual={"boot_s": 1e6, "tick_s": 0.02})
    await broker.market.step()
    stray = instance_name(INSTALLATION, attempt_id(await broker.submit(resources={"gpus": 64}), 99))
    await broker.provider.create(stray, broker.market.offers()[0], BootSpec(env={"GPUBROKER_ATTEMPT": "x"}))
    assert await broker.machines() == [stray]
    async with broker.running():
        await broker.eventually(lambda: _none_left(broker))


@pytest.mark.parametrize(
    ("sealed", "fix"),
    [(None, "gpubroker secret set HF_TOKEN"), (b"by another key", "secret HF_TOKEN: .* restore the key file")],
)
async def test_unavailable_secret_fails_its_job_at_once(house: Build, sealed: bytes | None, fix: str) -> None:
    """Nothing is bought, no other cloud is tried, and what was to be bought is still for sale to others."""
    async with house().running() as broker:
        if sealed is not None:
            await broker.store.as_tenant(Tenant(team=DEFAULT_TEAM, owner="me")).put_secret("me", "HF_TOKEN", sealed)
        job = await broker.submit(secrets=["HF_TOKEN"])
        done = await broker.state_of(job, JobState.FAILED)
        assert re.search(fix, done.reason), done.reason
        assert (done.reason.count("\n"), done.attempts, done.spent_usd) == (0, 1, Decimal(0))
        assert not await broker.store.blocked_offers()


async def _training(broker: House, job: JobId) -> None:
    async def trains() -> bool:
        return any(a.state is AttemptState.TRAINING for a in await broker.attempts(job))

    await broker.eventually(trains)


async def _none_left(broker: House) -> bool:
    return not await broker.machines()


def _event(job: JobId, kind: str) -> Event:
    return Event(job_id=job, kind=kind, message=kind)


async def _stop(broker: House, job: JobId) -> None:
    await broker.store.request_stop(job, _event(job, "job.stop_requested"))


async def test_what_runs_in_a_cloud_that_a_broker_lacks_is_left_to_another(
    house: Build, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that started while the blob store was away may; to hold a row that it cannot ask about starves it."""
    broker = house(virtual=ENDLESS)
    async with broker.running():
        job = await broker.submit()

        async def beats() -> bool:
            return any(attempt.beat is not None for attempt in await broker.attempts(job))

        await broker.eventually(beats)
        context = replace(broker.fleet("other").context, providers={})
        other = Fleet.build(context, BOX, list, ())
        by_name = {one.name: one for one in other.controllers}
        for _ in range(20):
            for name in ("launch", "liveness", "interruption", "termination", "billing", "guard"):
                assert not await by_name[name].step()
        assert "cannot be charged" not in caplog.text
        await broker.completed(job)
        assert [a.reason for a in await broker.attempts(job)] == [Reason.COMPLETED]
