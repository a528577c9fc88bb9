"""Contract of every store for prices, traffic, signals, notes of the guard, and stored data of jobs."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from broker.domain.errors import InUse, StoreError
from broker.domain.job import (
    AttemptState,
    Forecast,
    ForecastInterval,
    JobState,
    PriceChange,
    Signal,
    StoredData,
    Traffic,
)
from broker.domain.money import LedgerCategory
from broker.domain.tenancy import DEFAULT_TEAM, Tenant
from broker.ports import Change, Charge, Lane, Note, StorageCharge, Store, Upload
from tests.conformance.conftest import TimedStore
from tests.conformance.samples import HOUR, START, claimed_job, make_event, running, submitted

ANN = Tenant(team=DEFAULT_TEAM, owner="ann")
STRANGER = Tenant(team="others", owner="bob")


def forecast(**changes: object) -> Forecast:
    forecast = Forecast(usd=Decimal("12.345678"), finish_at=START + timedelta(hours=1), step_s=0.25, made_at=START)
    return replace(forecast, **changes)  # type: ignore[arg-type]


async def test_a_charge_records_the_price_and_keeps_traffic_apart(store: Store) -> None:
    attempt, job = await running(store)
    later = START + timedelta(minutes=1)
    rise, fall = (PriceChange(since=at, usd_per_hour=Decimal(p)) for at, p in ((later, "0.9"), (START, "0.123456")))
    rise = replace(rise, extra_machines=2)
    first = Charge(
        attempt_id=attempt.id, job_id=job.id, since=None, to=START, usd=Decimal(1), traffic_usd=Decimal("0.25"),
        prices=(rise,),
    )  # fmt: skip
    second = replace(first, since=START, to=later, usd=Decimal(0), traffic_usd=Decimal("0.5"), prices=(fall,))
    assert await store.charge([first, second, first]) == [True, True, False]
    (after,) = await store.attempts(job.id)
    assert (after.charged_usd, after.traffic_usd, after.charged_to) == (Decimal("1.75"), Decimal("0.75"), later)
    assert set(after.prices) == {rise, fall}
    now = await store.job(job.id)
    assert now is not None
    assert now.spent_usd == Decimal("1.75")
    charged = [(e.category, e.usd) for e in await store.ledger(job.id) if e.note == ""]
    assert charged == [
        (LedgerCategory.COMPUTE, 1), (LedgerCategory.EGRESS, Decimal("0.25")), (LedgerCategory.EGRESS, Decimal("0.5")),
    ]  # fmt: skip
    (leased,) = await store.claim_attempts(Lane.LIVENESS, owner="o", lease_s=HOUR, limit=1)
    assert set(leased.attempt.prices) == {rise, fall}
    assert (await store.as_tenant(ANN).attempts(job.id))[0].prices == after.prices
    with pytest.raises(StoreError):
        await store.charge([replace(second, since=later, traffic_usd=Decimal(-1))])


async def test_the_first_signal_stays(store: Store) -> None:
    attempt, job = await running(store)
    base = Charge(attempt_id=attempt.id, job_id=job.id, since=None, to=START, usd=Decimal(0))
    await store.charge([replace(base, signal=Signal.OUT_OF_TIME)])
    await store.charge([replace(base, since=START, signal=Signal.CAP)])
    assert (await store.attempts(job.id))[0].signal is Signal.OUT_OF_TIME
    (leased,) = await store.claim_attempts(Lane.INTERRUPTION, owner="o", lease_s=HOUR, limit=1)
    assert leased.attempt.signal is Signal.OUT_OF_TIME


async def test_counters_of_earlier_starts_are_kept(store: Store) -> None:
    attempt, job = await running(store)
    (leased,) = await store.claim_attempts(Lane.LIVENESS, owner="o", lease_s=HOUR, limit=1)
    more = replace(leased.attempt, earlier_traffic=Traffic(sent=2**53, received=7))
    assert await store.apply([Change(attempt=(leased.attempt, more))]) == [True]
    assert (await store.attempts(job.id))[0].earlier_traffic == Traffic(sent=2**53, received=7)
    assert attempt.earlier_traffic == Traffic()


async def test_one_of_two_brokers_reports(store: Store) -> None:
    attempt, job = await running(store)
    note = Note(
        attempt=attempt, job=job, forecast=forecast(over_cap=True), idle="gpu", signal=Signal.IDLE,
        events=(make_event(job, "job.overrun_forecast"),),
    )  # fmt: skip
    assert await store.note([note, note]) == [True, False]
    kinds = [e.kind for e in await store.events(job.id, after=0, limit=99)]
    assert kinds.count("job.overrun_forecast") == 1
    (after,) = await store.attempts(job.id)
    assert (after.idle, after.signal) == ("gpu", Signal.IDLE)
    now = await store.job(job.id)
    assert now is not None
    assert now.forecast == forecast(over_cap=True)
    again = Note(attempt=after, job=now, forecast=forecast(usd=Decimal(13), over_cap=True), idle=None)
    assert await store.note([again]) == [True]
    (after,) = await store.attempts(job.id)
    assert (after.idle, after.signal) == (None, Signal.IDLE)


async def test_one_of_two_brokers_requotes_an_attempt(store: Store) -> None:
    attempt, job = await running(store)
    later = START + timedelta(hours=2)
    interval = ForecastInterval(
        attempt=1, usd_low=Decimal(12), usd_high=Decimal("13.5"), finish_earliest=START, finish_latest=later
    )
    note = Note(attempt=attempt, job=job, forecast=forecast(interval=interval), idle=None)
    assert await store.note([note, note]) == [True, False]
    now = await store.job(job.id)
    assert now is not None
    assert now.forecast == forecast(interval=interval)


async def test_notes_of_many_jobs_are_applied_each_by_its_own_fence(store: Store) -> None:
    rows = [await running(store) for _ in range(60)]
    notes = [
        Note(
            attempt=attempt, job=job, forecast=None, idle="gpu" if number % 2 else None, stays=f"stays {number}",
            events=(make_event(job, "attempt.stays"), make_event(job, "attempt.idle")),
        )
        for number, (attempt, job) in enumerate(rows)
    ]  # fmt: skip
    assert await store.note(notes[7:8]) == [True]
    expected = [number != 7 for number in range(60)]
    assert await store.note(notes) == expected
    for number, (attempt, job) in enumerate(rows):
        (after,) = await store.attempts(job.id)
        assert (after.id, after.idle, after.stays) == (attempt.id, notes[number].idle, f"stays {number}")
        events = await store.events(job.id, after=0, limit=99)
        assert [event.kind for event in events][-2:] == ["attempt.stays", "attempt.idle"]
        assert [event.seq for event in events] == list(range(1, len(events) + 1))


@pytest.mark.parametrize("signal", Signal)
async def test_a_note_stores_each_signal_and_a_clean_reason(store: Store, signal: Signal) -> None:
    attempt, job = await running(store)
    note = Note(attempt=attempt, job=job, forecast=None, idle=None, signal=signal, reason="moves to spot\x00 in eu")
    assert await store.note([note]) == [True]
    (after,) = await store.attempts(job.id)
    now = await store.job(job.id)
    assert now is not None
    assert after.signal is signal
    assert now.reason is not None
    assert now.reason.startswith("moves to spot")
    assert "\x00" not in now.reason


async def test_nothing_is_noted_of_an_attempt_that_has_ended(store: Store) -> None:
    attempt, job = await running(store, AttemptState.ENDED)
    assert await store.note([Note(attempt=attempt, job=job, forecast=forecast(), idle=None)]) == [False]


async def test_storage_is_checked_in_turn_and_charged_once(timed_store: TimedStore) -> None:
    store = timed_store.store
    job = await submitted(store)
    (due,) = await store.claim_stored(lease_s=600, limit=9)
    assert due.id == job.id
    assert await store.claim_stored(lease_s=600, limit=9) == []
    await timed_store.pass_time(601)
    assert [one.id for one in await store.claim_stored(lease_s=600, limit=9)] == [job.id]
    stored = StoredData(bytes=5, accrued_usd=Decimal("0.1234567"), charged_usd=Decimal("0.123457"), to=START)
    charge = StorageCharge(job_id=job.id, read=None, to=stored, usd=stored.charged_usd, due_in_s=600)
    assert await store.charge_storage(charge)
    assert not await store.charge_storage(charge)
    now = await store.job(job.id)
    assert now is not None
    assert now.stored == stored
    assert now.spent_usd == Decimal(0)
    (entry,) = await store.ledger(job.id)
    assert (entry.category, entry.attempt_id, entry.usd) == (LedgerCategory.STORAGE, None, stored.charged_usd)
    await timed_store.pass_time(300)
    assert await store.claim_stored(lease_s=600, limit=9) == []
    await timed_store.pass_time(301)
    assert len(await store.claim_stored(lease_s=600, limit=9)) == 1
    assert await store.charge_storage(replace(charge, read=stored, usd=Decimal(0), due_in_s=None))
    await timed_store.pass_time(10**6)
    assert await store.claim_stored(lease_s=600, limit=9) == []


async def test_a_terminal_job_is_due_for_a_storage_check_at_once(timed_store: TimedStore) -> None:
    store = timed_store.store
    await submitted(store)
    (job,) = await store.claim_stored(lease_s=HOUR, limit=9)
    stored = StoredData(bytes=5, accrued_usd=Decimal(0), charged_usd=Decimal(0), to=START)
    await store.charge_storage(StorageCharge(job_id=job.id, read=None, to=stored, usd=Decimal(0), due_in_s=HOUR))
    row = await claimed_job(store)
    rest = replace(row, state=JobState.FAILED, finished_at=START)
    assert await store.apply([Change(job=(row, rest))]) == [True]
    assert [one.id for one in await store.claim_stored(lease_s=600, limit=9)] == [job.id]


async def test_only_what_is_at_rest_is_deleted_and_only_by_its_team(store: Store) -> None:
    job = await submitted(store)
    event = make_event(job, "job.data_deleted")
    with pytest.raises(InUse, match="is queued"):
        await store.as_tenant(ANN).delete_data(job.id, ["logs"], event)
    row = await claimed_job(store)
    rest = replace(row, state=JobState.FAILED, finished_at=START)
    assert await store.apply([Change(job=(row, rest))]) == [True]
    assert await store.as_tenant(STRANGER).delete_data(job.id, ["logs"], event) is None
    marked = await store.as_tenant(ANN).delete_data(job.id, ["logs", "data"], event)
    assert marked is not None
    assert set(marked.deleted) == {"logs", "data"}
    again = await store.as_tenant(ANN).delete_data(job.id, ["logs"], event)
    assert again is not None
    assert again.deleted == marked.deleted
    assert [e.kind for e in await store.events(job.id, after=0, limit=9)] == ["job.data_deleted"]


async def test_a_job_that_was_just_stopped_is_not_capped(store: Store) -> None:
    """A capped job would wait for its user, who was informed that the job stops; raising the cap would have no
    effect.
    """
    await submitted(store)
    row = await claimed_job(store)
    await store.as_tenant(ANN).request_stop(row.id, make_event(row, "job.stop_requested"))
    assert await store.apply([Change(job=(row, replace(row, state=JobState.CAPPED)))]) == [False]
    again = replace(row, stop_requested=True)
    cancelled = replace(again, state=JobState.CANCELLED, finished_at=START)
    assert await store.apply([Change(job=(again, cancelled))]) == [True]


async def test_a_capped_job_without_its_input_is_not_queued_by_a_higher_cap(store: Store) -> None:
    """A queued job would get a machine that finds no data."""
    await submitted(store)
    row = await claimed_job(store)
    assert await store.apply([Change(job=(row, replace(row, state=JobState.CAPPED)))]) == [True]
    mine = store.as_tenant(ANN)
    await mine.delete_data(row.id, ["data"], make_event(row, "job.data_deleted"))
    raised = await mine.raise_cap(row.id, row.cap_usd + 1, make_event(row, "job.cap_raised"))
    assert raised is not None
    assert (raised.state, raised.cap_usd) == (JobState.CAPPED, row.cap_usd)
    assert [e.kind for e in await store.events(row.id, after=0, limit=9)] == ["job.data_deleted"]


async def test_an_upload_that_is_not_sent_again_is_deleted(timed_store: TimedStore) -> None:
    store = timed_store.store
    mine, old, new = store.as_tenant(ANN), "a" * 64, "b" * 64
    for sha256 in (old, new):
        await mine.put_upload("ann", Upload(sha256=sha256, bytes=1, name="x.csv", summary=None))
    await timed_store.pass_time(1000)
    await mine.put_upload("bob", Upload(sha256=new, bytes=1, name="x.csv", summary=None))
    assert await store.forget_uploads(older_than_s=500, limit=9) == [old]
    assert await store.forget_uploads(older_than_s=500, limit=9) == []
    assert set(await store.known_uploads([old, new, "c" * 64])) == {new}
    gone = await mine.upload("ann", old)
    assert gone is not None
    assert gone.gone_at is not None
    await mine.put_upload("ann", Upload(sha256=old, bytes=1, name="x.csv", summary=None))
    back = await mine.upload("ann", old)
    assert back is not None
    assert back.gone_at is None
