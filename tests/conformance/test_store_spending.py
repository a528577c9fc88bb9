"""Contract of every store for queries of spending."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

from broker.domain.ids import AttemptId
from broker.domain.job import Attempt, AttemptState, Job, JobState, Reason
from broker.domain.money import ZERO, LedgerCategory, LedgerKind
from broker.domain.offer import CostParts
from broker.domain.spending import FinishedJob, PaidJob, SpendWindow
from broker.domain.tenancy import DEFAULT_TEAM, OPERATOR, Tenant
from broker.ports import Change, Charge, Store
from tests.conformance.samples import (
    START,
    claimed_job,
    make_attempt,
    make_event,
    make_line,
    running,
    submitted,
)
from trainer.contract.documents import Final, Heartbeat

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


async def finish(
    store: Store, state: JobState = JobState.SUCCEEDED, line: Mapping[str, object] | None = None, **changes: object
) -> Job:
    """Return an ended job of three attempts: one without a heartbeat, one preempted, and one that completed."""
    job = await submitted(store, **changes)
    last = {"attempt": "a", "outcome": "completed", "step": 45, "total_steps": 45, "peak_memory_bytes": 900}
    beat = Heartbeat(attempt=AttemptId("a"), boot="b", seq=1, phase="training", step=7, peak_memory_bytes=700)
    ends: Sequence[tuple[dict[str, object], Reason]] = (
        ({}, Reason.NO_CAPACITY),
        ({"first_beat_at": START, "beat": beat}, Reason.PREEMPTED),
        ({"first_beat_at": START, "final": Final.model_validate(last)}, Reason.COMPLETED),
    )
    for number, (shown, reason) in enumerate(ends, 1):
        claimed = await claimed_job(store) if number == 1 else await store.job(job.id)
        assert claimed is not None
        bought = make_attempt(claimed, number, line=replace(make_line(), **line or {}))  # type: ignore[arg-type]
        active = replace(claimed, state=JobState.ACTIVE, attempts=number)
        assert await store.apply([Change(job=(claimed, active), admit=bought)]) == [True]
        assert await store.charge([charge(bought, None, 1, f"0.{number}")]) == [True]
        stored = next(a for a in await store.attempts(job.id) if a.number == number)
        at = START + timedelta(hours=number)
        ended = replace(
            stored, state=AttemptState.ENDED, reason=reason, create_sent_at=at, terminating_since=at, ended_at=at,
            **shown,  # type: ignore[arg-type]
        )  # fmt: skip
        assert await store.apply([Change(attempt=(stored, ended))]) == [True]
    current = await store.job(job.id)
    assert current is not None
    assert await store.apply([Change(job=(current, replace(current, state=state, finished_at=START)))]) == [True]
    return current


async def test_a_finished_job_has_the_first_working_quote_and_all_results(store: Store) -> None:
    costs = CostParts(machines=ZERO, traffic=ZERO, storage=Decimal("0.02"), requests=Decimal("0.01"))
    line = {"tier": "transferred", "usd_p90": Decimal("0.6"), "hours_p90": 0.75, "costs": costs}
    await finish(store, line=line)
    await finish(store, JobState.FAILED)
    (job,) = await store.finished(EVER, limit=10)
    assert job == FinishedJob(
        accelerator="l40s", gpus=1, simulated=False, emulated=False, family="llama", method="lora", task="causal_lm",
        tier="transferred", usd_p50=Decimal("0.4"), usd_p90=Decimal("0.6"), bucket_usd=Decimal("0.03"), hours_p50=0.5,
        hours_p90=0.75, memory=make_line().memory, spent_usd=Decimal("0.5"), hours=1.0, peak_bytes=700,
        out_of_memory=False,
    )  # fmt: skip


async def test_finished_jobs_are_of_the_window_the_team_and_the_limit(store: Store) -> None:
    await store.as_tenant(OPERATOR).put_team("blue", "")
    await finish(store)
    await finish(store, team="blue")
    assert len(await store.finished(EVER, limit=10)) == 2
    assert len(await store.finished(EVER, limit=1)) == 1
    assert len(await store.as_tenant(Tenant(team="blue", owner="ann")).finished(EVER, limit=10)) == 1
    assert len(await store.finished(replace(EVER, until=datetime(2021, 1, 1, tzinfo=UTC)), limit=10)) == 0
