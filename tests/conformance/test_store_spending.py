"""Contract of every store for queries of spending."""

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

from broker.domain.job import Attempt, AttemptState, Job
from broker.domain.money import LedgerCategory, LedgerKind
from broker.domain.spending import PaidJob, SpendWindow
from broker.domain.tenancy import DEFAULT_TEAM, OPERATOR, Tenant
from broker.ports import Change, Charge, Store
from tests.conformance.samples import START, make_event, running

EVER = SpendWindow(since=datetime(2020, 1, 1, tzinfo=UTC), until=datetime(2100, 1, 1, tzinfo=UTC))


def charge(attempt: Attempt, since: datetime | None, minutes: int, usd: str, **more: object) -> Charge:
    return Charge(
        attempt_id=attempt.id, job_id=attempt.job_id, since=since, to=START + timedelta(minutes=minutes),
        usd=Decimal(usd), **more,  # type: ignore[arg-type]
    )  # fmt: skip


async def paid_for(store: Store, **changes: object) -> tuple[Attempt, Job]:
    attempt, job = await running(store, AttemptState.TRAINING, **changes)
    assert await store.charge([charge(attempt, None, 1, "0.10")]) == [True]
    assert await store.charge([charge(attempt, START + timedelta(minutes=1), 2, "0.25")]) == [True]
    late = charge(attempt, START + timedelta(minutes=2), 3, "1", kind=LedgerKind.ADJUSTMENT, note="seen late")
    assert await store.charge([late]) == [True]
    return attempt, job


async def test_charges_and_adjustments_are_paid_and_reservations_are_not(store: Store) -> None:
    attempt, job = await paid_for(store)
    paid = await store.paid(EVER)
    (piece,) = paid.slices
    assert (piece.job_id, piece.attempt_id, piece.category) == (job.id, attempt.id, LedgerCategory.COMPUTE)
    assert piece.usd == Decimal("1.35")
    one = paid.attempts[attempt.id]
    assert (one.attempt.id, one.compute_usd, one.dearest_usd) == (attempt.id, Decimal("1.35"), None)
    assert paid.jobs == {job.id: PaidJob(name="tune", team=DEFAULT_TEAM, owner="ann")}


async def test_the_dearest_kept_offer_comes_from_the_intent(store: Store) -> None:
    attempt, job = await paid_for(store)
    event = make_event(
        job, "attempt.planned", attempt_id=attempt.id, data={"dearest": {"offer": "x", "usd_p50": "9.5"}}
    )
    assert await store.apply([Change(events=(event,))]) == [True]
    assert (await store.paid(EVER)).attempts[attempt.id].dearest_usd == Decimal("9.5")


async def test_only_the_window_is_paid_but_an_attempt_is_known_whole(store: Store) -> None:
    await paid_for(store)
    nothing = await store.paid(replace(EVER, until=datetime(2021, 1, 1, tzinfo=UTC)))
    assert (list(nothing.slices), dict(nothing.attempts), dict(nothing.jobs)) == ([], {}, {})


async def test_days_are_those_of_the_zone(store: Store) -> None:
    await paid_for(store)
    days: set[date] = set()
    for zone in ("Pacific/Kiritimati", "Pacific/Pago_Pago"):  # 25 hours apart, so never the same day
        days |= {piece.day for piece in (await store.paid(replace(EVER, zone=zone))).slices}
    assert len(days) >= 2


async def test_a_team_sees_its_own_spending_only(store: Store) -> None:
    await store.as_tenant(OPERATOR).put_team("blue", "")
    attempt, job = await paid_for(store, team="blue")
    mine = await store.as_tenant(Tenant(team="blue", owner="ann")).paid(EVER)
    assert set(mine.jobs) == {job.id}
    assert set(mine.attempts) == {attempt.id}
    other = await store.as_tenant(Tenant(team=DEFAULT_TEAM, owner="bob")).paid(EVER)
    assert (list(other.slices), dict(other.attempts), dict(other.jobs)) == ([], {}, {})
