"""A digest period is reported once by any number of brokers, and across restarts."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

from broker.controllers.base.context import ControllerContext
from broker.controllers.notifications.digest import Digest
from broker.domain.ids import Installation
from broker.domain.notifications import Notice
from broker.ports import Charge
from broker.reporting.digest import DigestPlan
from tests.conformance.samples import ManualClock, running
from tests.support.memory_store.store import MemoryStore

PLAN = DigestPlan(weekly=False)


def digest(store: MemoryStore, clock: ManualClock, plan: DigestPlan = PLAN) -> Digest:
    context = ControllerContext(
        installation=Installation("test"), owner="o", store=store, blobs=None, providers={}, clock=clock,  # type: ignore[arg-type]
    )  # fmt: skip
    return Digest(context, plan)


async def told(store: MemoryStore) -> list[Notice]:
    streams = await store.claim_streams(["log"], busy=[], owner="o", lease_s=0, limit=99, depth=99)
    return [p.delivery.notice for stream in streams for p in stream.pending if p.delivery.notice]


async def test_a_day_is_reported_once_by_any_number_of_brokers() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    attempt, job = await running(store)
    charge = Charge(attempt_id=attempt.id, job_id=job.id, since=attempt.charged_to, to=clock.now(), usd=Decimal("1.25"))
    assert await store.charge([charge]) == [True]
    one, two = digest(store, clock), digest(store, clock)
    await one.step()
    before = len(await told(store))
    clock.time = datetime(2026, 3, 2, 9, tzinfo=UTC)
    for _ in range(3):
        await one.step()
        await two.step()
    await digest(store, clock).step()
    new = (await told(store))[before:]
    assert [(notice.id, notice.team, notice.data["spent_usd"]) for notice in new] == [
        ("digest-daily-2026-03-02-default", "default", "1.25")
    ]
    assert [row["id"] for row in new[0].data["running"]] == [job.id]
    clock.time += timedelta(days=1)
    await one.step()
    assert [notice.id for notice in await told(store)][-1] == "digest-daily-2026-03-03-default"


async def test_no_digest_is_made_without_a_subscribed_channel() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    await running(store)
    await digest(store, clock, DigestPlan(daily=False, weekly=False)).step()
    assert await told(store) == []
