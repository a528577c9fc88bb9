"""Time, storage and retention through the real controllers, over both stores."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from broker.billing.accrual import accrued, traffic_cost
from broker.controllers.base.context import ControllerContext, CostSettings
from broker.controllers.billing.retention import RetentionController as Keeper
from broker.domain.errors import InUse
from broker.domain.ids import attempt_id
from broker.domain.instance import Observed
from broker.domain.job import Event, JobState, Reason, Traffic
from broker.domain.money import ZERO, LedgerCategory, LedgerKind
from broker.domain.offer import HostFacts
from broker.domain.spec import Retention
from broker.domain.tenancy import DEFAULT_TEAM, Tenant
from broker.ports import Upload
from tests.support.rig.broker_rig import BrokerRig, RigBuilder
from tests.support.rig.simulated_cloud import SimulatedCloud
from trainer.contract import object_keys as keys

LONG = {"run_s": 3600, "boot_s": 0.05, "beat_s": 0.1, "tick_s": 0.02}


async def test_a_deadline_saves_and_ends_in_time_and_a_retry_can_resume(build_rig: RigBuilder) -> None:
    rig = build_rig(virtual=LONG)
    # Both are reserved for the end and remain unused here: they cover a database that pauses.
    rig.limits = rig.limits.model_copy(update={"drain_s": 8})
    rig.intervals = replace(rig.intervals, look_s=1.0)
    async with rig.running():
        deadline = rig.clock.now() + timedelta(seconds=25)
        job = await rig.submit(deadline=deadline.isoformat(), resources={"spot": "never"})
        failed = await rig.state_of(job, JobState.FAILED)
        (attempt,) = await rig.attempts(job)
        assert attempt.reason is Reason.OUT_OF_TIME
        assert failed.reason.startswith("out of time: its deadline")
        assert attempt.absent_at is not None
        assert attempt.absent_at <= deadline
        assert failed.machine_s == pytest.approx(
            (attempt.absent_at - (attempt.create_sent_at or deadline)).total_seconds()
        )
        assert [b for b in await rig.blobs.list(keys.checkpoints(job)) if b.key.endswith(keys.MANIFEST)]
        kinds = [e.kind for e in await rig.events(job)]
        assert kinds.index("job.out_of_time") < kinds.index("attempt.draining") < kinds.index("job.failed")


async def test_a_job_that_waits_past_its_deadline_fails_with_the_reason(build_rig: RigBuilder) -> None:
    async with build_rig().running() as rig:
        deadline = rig.clock.now() + timedelta(seconds=4)
        job = await rig.submit(deadline=deadline.isoformat(), resources={"accelerators": ["b200"]})
        failed = await rig.state_of(job, JobState.FAILED)
        assert "its deadline" in failed.reason
        assert await rig.attempts(job) == []


async def stored_kinds(rig: BrokerRig, job: str) -> set[str]:
    """Return kinds of objects that are there."""
    prefixes = {"checkpoints": f"checkpoints/{job}/", "data": "data/"}
    found = {kind for kind, prefix in prefixes.items() if await rig.blobs.list(prefix)}
    attempts = await rig.store.attempts(job)  # type: ignore[arg-type]
    return found | {"logs" for a in attempts if await rig.blobs.list(f"attempts/{a.id}/")}


async def test_stored_data_is_charged_and_deleted_after_its_retention(build_rig: RigBuilder) -> None:
    rig = build_rig()
    rig.costs = CostSettings(
        storage_usd_per_gib_month=Decimal(10**12), retention=Retention(checkpoints_days=0, logs_days=0, data_days=9)
    )
    async with rig.running():
        job = await rig.submit()
        await rig.blobs.put(keys.job_data(job, "0" * 64), b"x" * 1000)
        done = await rig.state_of(job, JobState.SUCCEEDED)
        spent = done.spent_usd
        results = {b.key for b in await rig.blobs.list(keys.checkpoints(job))}
        keeper = keeper_of(rig)
        await rig.eventually(lambda: _looked(rig, keeper, job))
        assert await stored_kinds(rig, job) == {"checkpoints", "data"}, "its results, which nothing said to delete"
        assert {b.key for b in await rig.blobs.list(keys.checkpoints(job))} <= results
        now = await rig.store.job(job)
        assert now is not None
        assert set(now.deleted) == {"checkpoints", "logs"}
        assert now.spent_usd == spent, "the cap is for machines"
        storage = [e for e in await rig.store.ledger(job) if e.category is LedgerCategory.STORAGE]
        assert now.stored is not None
        assert all(e.attempt_id is None for e in storage)
        assert sum((e.usd for e in storage), ZERO) == now.stored.charged_usd
        deletions = [e for e in await rig.events(job) if e.kind == "job.data_deleted"]
        assert len(deletions) == 1


def unhurried(rig: BrokerRig) -> ControllerContext:
    """Return a context with long leases, because a busy machine may stretch a round. A controller that a test steps by
    hand has no second try.
    """
    context = rig.fleet("keeper").context
    return replace(context, intervals=replace(context.intervals, lease_s=600))


def keeper_of(rig: BrokerRig) -> Keeper:
    return Keeper(unhurried(rig))


async def _looked(rig: BrokerRig, keeper: Keeper, job: str) -> bool:
    """Wait for the polls of another controller, then poll at once."""
    await keeper.step()
    now = await rig.store.job(job)  # type: ignore[arg-type]
    return (
        now is not None and bool(now.deleted) and now.stored is not None and "logs" not in await stored_kinds(rig, job)
    )


async def test_superseded_checkpoints_are_deleted_while_the_job_runs(build_rig: RigBuilder) -> None:
    """Superseded checkpoints are deleted once the next attempt has committed two, which stay."""
    rig = build_rig(virtual=LONG)
    rig.intervals = replace(rig.intervals, stored_s=0)
    async with rig.running():
        job = await rig.submit()
        keeper = keeper_of(rig)

        async def committed(number: int) -> int:
            found = await rig.blobs.list(f"{keys.checkpoints(job)}{attempt_id(job, number)}/")
            return sum(blob.key.endswith(keys.MANIFEST) for blob in found)

        async def first_has_some() -> bool:
            return await committed(1) > 0

        async def collected() -> bool:
            await keeper.step()
            return await committed(1) == 0

        await rig.eventually(first_has_some)
        (machine,) = rig.body._instances.values()
        machine.dies_at = 0.0
        await rig.until(job, lambda found: found.attempts > 1)
        await rig.eventually(collected)
        assert await committed(2) >= 2
        assert (await rig.state_of(job, JobState.ACTIVE)).stored is not None


async def test_a_running_job_keeps_checkpoints_that_another_job_starts_from(build_rig: RigBuilder) -> None:
    """A job at its cap was retried as another job, and its cap is raised after that."""
    rig = build_rig(virtual=LONG)
    rig.intervals = replace(rig.intervals, stored_s=0)
    async with rig.running():
        job = await rig.submit()
        keeper = keeper_of(rig)

        async def manifests(number: int) -> list[str]:
            found = await rig.blobs.list(f"{keys.checkpoints(job)}{attempt_id(job, number)}/")
            return [blob.key for blob in found if blob.key.endswith(keys.MANIFEST)]

        async def first_has_some() -> bool:
            return bool(await manifests(1))

        async def second_has_passed() -> bool:
            return len(await manifests(2)) >= 2

        async def collected() -> bool:
            await keeper.step()
            return not await manifests(1)

        await rig.eventually(first_has_some)
        (machine,) = rig.body._instances.values()
        machine.dies_at = 0.0
        await rig.until(job, lambda found: found.attempts > 1)
        left = await manifests(1)
        heir = await rig.submit(init_from=f"job/{job}", resources={"accelerators": ["b200"]})
        await rig.eventually(second_has_passed)
        for _ in range(3):
            await keeper.step()
        assert await manifests(1) == left
        await rig.stop(heir)
        await rig.state_of(heir, JobState.CANCELLED)
        await rig.eventually(collected)


async def test_data_that_a_live_job_starts_from_cannot_be_deleted(build_rig: RigBuilder) -> None:
    async with build_rig().running() as rig:
        job = await rig.submit()
        await rig.state_of(job, JobState.SUCCEEDED)
        heir = await rig.submit(init_from=f"job/{job}", resources={"accelerators": ["b200"]})
        event = Event(job_id=job, kind="job.data_deleted", message="deleted")
        with pytest.raises(InUse, match=heir):
            await rig.store.delete_data(job, ["artifacts"], event)
        with pytest.raises(InUse, match="is queued"):
            await rig.store.delete_data(heir, ["logs"], event)
        marked = await rig.store.delete_data(job, ["logs", "data"], event)
        assert marked is not None
        assert set(marked.deleted) == {"logs", "data"}
        await rig.stop(heir)
        await rig.state_of(heir, JobState.CANCELLED)
        again = await rig.store.delete_data(job, ["logs", "artifacts"], event)
        assert again is not None
        assert set(again.deleted) == {"artifacts", "logs", "data"}
        assert again.deleted["logs"] == marked.deleted["logs"], "the first date stays"


async def test_only_uploads_that_are_not_sent_again_are_deleted(build_rig: RigBuilder) -> None:
    rig = build_rig()
    old, new, lost = ("a" * 64, "b" * 64, "c" * 64)
    for sha256 in (old, new, lost):
        await rig.blobs.put(keys.upload(sha256), b"x")
    rig.costs = CostSettings(uploads_days=0)
    fleet = unhurried(rig)
    mine = fleet.store.as_tenant(Tenant(team=DEFAULT_TEAM, owner="me"))
    await mine.put_upload("me", Upload(sha256=old, bytes=1, name="a.csv", summary=None))
    await Keeper(fleet).step()
    gone = await mine.upload("me", old)
    assert gone is not None
    assert gone.gone_at is not None
    await mine.put_upload("me", Upload(sha256=new, bytes=1, name="b.csv", summary=None))
    keeper = Keeper(replace(fleet, costs=CostSettings()))
    for _ in range(2):
        keeper._uploads_at = float("-inf")
        await keeper.step()
    assert [b.key for b in await rig.blobs.list("uploads/")] == [keys.upload(new)]


class Moving(SimulatedCloud):
    """Cloud that raises the price a little at each listing from the third on."""

    def as_listed(self, machine: Observed) -> Observed | None:
        price = Decimal("0.9") + Decimal("0.01") * max(0, self.listings - 2)
        return replace(machine, usd_per_hour=price, price_moves=True)


async def test_a_price_that_moves_is_charged_as_it_is_read_back(build_rig: RigBuilder) -> None:
    rig = build_rig(cloud=Moving, virtual=LONG)
    async with rig.running():
        job = await rig.submit(resources={"spot": "only"})

        async def moved() -> bool:
            return any(len(attempt.prices) > 1 for attempt in await rig.attempts(job))

        await rig.eventually(moved)
        await rig.stop(job)
        done = await rig.state_of(job, JobState.CANCELLED)
        (attempt,) = await rig.attempts(job)
        rises = [change.usd_per_hour for change in attempt.prices]
        assert len(rises) > 1
        assert rises == sorted(rises)
        assert attempt.absent_at is not None
        assert done.spent_usd == attempt.charged_usd >= accrued(attempt, attempt.absent_at)
        assert accrued(attempt, attempt.absent_at) > accrued(replace(attempt, prices=()), attempt.absent_at)


async def test_egress_is_charged_within_the_cap(build_rig: RigBuilder) -> None:
    rig = build_rig()
    facts = HostFacts(egress_usd_per_gib=Decimal(1000))
    async with rig.running():
        rig.for_sale = [replace(offer, facts=facts) for offer in rig.market.offers()]
        job = await rig.submit()
        done = await rig.state_of(job, JobState.SUCCEEDED)
        (attempt,) = await rig.attempts(job)
        assert attempt.final is not None
        assert attempt.final.sent_bytes > 0
        sent = traffic_cost(attempt.line.offer, Traffic(sent=attempt.final.sent_bytes))
        assert attempt.traffic_usd == sent > 0
        by_category = dict.fromkeys(LedgerCategory, ZERO)
        for entry in await rig.store.ledger(job):
            by_category[entry.category] += entry.usd if entry.kind is LedgerKind.CHARGE else ZERO
        assert by_category[LedgerCategory.EGRESS] == sent
        assert sum(by_category.values(), ZERO) == done.spent_usd == attempt.charged_usd
