"""Reports of what was paid: nothing counted twice, nothing left out, and lost work is cost."""

from dataclasses import replace
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.billing.spending import billed_hours, lost_share, report
from broker.domain.ids import AttemptId, JobId
from broker.domain.job import Attempt, AttemptState, Reason
from broker.domain.money import ZERO, LedgerCategory
from broker.domain.spending import Paid, PaidAttempt, PaidJob, Slice, SpendBy
from tests.support.build import JOB_ID, at, attempt, line
from trainer.contract.documents import CheckpointRef, Final, Heartbeat, Outcome

HOUR = 3600.0
WAYS: tuple[SpendBy, ...] = ("job", "user", "team", "cloud", "gpu", "day", "month")


def ended(reason: Reason = Reason.PREEMPTED, **changes: Any) -> Attempt:
    """Return an attempt of two hours: half an hour to the first heartbeat, then training, absent at once."""
    values: dict[str, Any] = {
        "reason": reason, "first_beat_at": at(HOUR / 2), "terminating_since": at(2 * HOUR), "absent_at": at(2 * HOUR),
        "ended_at": at(2 * HOUR), "charged_to": at(2 * HOUR), "charged_usd": Decimal("0.72"),
    }  # fmt: skip
    return attempt(AttemptState.ENDED, **(values | changes))


def beat(step: int, saved: int | None = None, resumed: int | None = None) -> Heartbeat:
    ref = CheckpointRef(manifest="m", step=saved) if saved is not None else None
    return Heartbeat(attempt="a", boot="b", seq=1, step=step, checkpoint=ref, resumed_from=resumed)


def paid(*attempts: PaidAttempt, slices: tuple[Slice, ...] = ()) -> Paid:
    whole = [
        Slice(
            job_id=attempt.attempt.job_id, attempt_id=attempt.attempt.id, category=LedgerCategory.COMPUTE,
            day=date(2026, 1, 1), usd=attempt.compute_usd,
        )
        for attempt in attempts
    ]  # fmt: skip
    return Paid(
        slices=(*whole, *slices),
        attempts={attempt.attempt.id: attempt for attempt in attempts},
        jobs={JOB_ID: PaidJob(name="tune", team="nlp", owner="ann")},
    )


@pytest.mark.parametrize(
    ("one", "share"),
    [
        (ended(Reason.COMPLETED, beat=beat(100)), "0"),
        (attempt(AttemptState.TRAINING, beat=beat(100)), "0"),
        (ended(Reason.NO_CAPACITY, first_beat_at=None), "1"),
        (ended(beat=None), "1"),
        (ended(beat=beat(100)), "0.75"),  # of 2 h it trained 1.5 h, and nothing was saved
        (ended(beat=beat(100, saved=100)), "0"),
        (ended(beat=beat(100, saved=60)), "0.3"),
        (ended(beat=beat(100, saved=60, resumed=60)), "0.75"),
        (ended(beat=beat(60, saved=60), final=Final(attempt="a", outcome=Outcome.DRAINED, step=100)), "0.3"),
        (ended(beat=beat(100), absent_at=at(0), ended_at=at(0)), "0"),
    ],
)
def test_lost_work_is_what_no_checkpoint_kept(one: Attempt, share: str) -> None:
    assert lost_share(one) == Decimal(share)


def test_hours_are_those_that_were_billed() -> None:
    assert billed_hours(ended()) == 2
    assert billed_hours(attempt(AttemptState.TRAINING, charged_to=at(HOUR))) == 1
    assert billed_hours(attempt(AttemptState.PLANNED)) == 0
    from_running = line(billed_from="running")
    assert billed_hours(ended(line=from_running, running_at=at(HOUR))) == 1
    assert billed_hours(ended(line=from_running)) == 2


def test_savings_are_against_the_useful_hours_only() -> None:
    one = ended(beat=beat(100, saved=60), line=replace(line(), usd_p50=Decimal("0.72")))  # 30 % of it lost
    total = report(paid(PaidAttempt(attempt=one, compute_usd=Decimal("0.72"), dearest_usd=Decimal(2))), "job").total
    assert total.lost_usd == Decimal("0.216")
    assert (total.machine_hours, total.gpu_hours) == (2.0, 2.0)
    assert total.on_demand_usd == Decimal("1.26")  # 0.90 x 2 h x 0.7
    assert total.saved_on_demand_usd == Decimal("0.54")
    assert total.dearest_usd == Decimal("1.4")
    assert total.saved_dearest_usd == Decimal("0.68")


def test_an_attempt_without_an_on_demand_price_saves_nothing() -> None:
    one = ended(Reason.COMPLETED, line=line(on_demand_usd_per_hour=None))
    total = report(paid(PaidAttempt(attempt=one, compute_usd=Decimal("0.72"))), "cloud").total
    assert (total.on_demand_of_usd, total.dearest_of_usd) == (ZERO, ZERO)
    assert (total.saved_on_demand_usd, total.saved_dearest_usd) == (ZERO, ZERO)


def test_an_on_demand_machine_saves_nothing_against_itself() -> None:
    one = ended(Reason.COMPLETED, line=line(spot=False), charged_usd=Decimal("0.72"))
    total = report(paid(PaidAttempt(attempt=one, compute_usd=Decimal("0.72"))), "gpu").total
    assert total.saved_on_demand_usd == 0


def test_part_of_a_life_is_measured_by_its_share_of_the_money() -> None:
    one = ended(Reason.COMPLETED)
    part = Slice(
        job_id=JOB_ID, attempt_id=one.id, category=LedgerCategory.COMPUTE, day=date(2026, 1, 1), usd=Decimal("0.18")
    )
    given_ = replace(paid(PaidAttempt(attempt=one, compute_usd=Decimal("0.72"))), slices=(part,))
    (row,) = report(given_, "day").rows
    assert (row.key, row.usd, row.machine_hours) == ("2026-01-01", Decimal("0.18"), 0.5)


def test_an_attempt_of_no_cost_has_no_hours() -> None:
    one = ended(Reason.COMPLETED)
    (row,) = report(paid(PaidAttempt(attempt=one, compute_usd=ZERO)), "month").rows
    assert (row.key, row.usd, row.machine_hours) == ("2026-01", ZERO, 0.0)


def test_storage_and_egress_have_columns_of_their_own() -> None:
    one = ended(Reason.COMPLETED)
    more = (
        Slice(job_id=JOB_ID, attempt_id=None, category=LedgerCategory.STORAGE, day=date(2026, 2, 1), usd=Decimal(3)),
        Slice(job_id=JOB_ID, attempt_id=one.id, category=LedgerCategory.EGRESS, day=date(2026, 1, 1), usd=Decimal(2)),
    )
    made = report(paid(PaidAttempt(attempt=one, compute_usd=Decimal("0.72")), slices=more), "cloud")
    assert [(row.key, row.usd) for row in made.rows] == [("-", Decimal(3)), ("runpod", Decimal("2.72"))]
    assert (made.total.compute_usd, made.total.egress_usd, made.total.storage_usd) == (Decimal("0.72"), 2, 3)
    assert (made.total.jobs, made.total.attempts) == (1, 1)


MONEY = st.decimals(min_value=0, max_value=1000, places=6, allow_nan=False)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), MONEY, st.sampled_from(LedgerCategory)), max_size=30),
    st.sampled_from(WAYS),
)
def test_every_cent_is_in_one_row_and_in_the_total(
    made: list[tuple[int, int, Decimal, LedgerCategory]], by: SpendBy
) -> None:
    attempts = [
        PaidAttempt(attempt=ended(id=AttemptId(str(n)), job_id=JobId(str(n % 2))), compute_usd=Decimal(9))
        for n in range(6)
    ]
    slices = tuple(
        Slice(
            job_id=JobId(str(n % 2)), attempt_id=None if category is LedgerCategory.STORAGE else AttemptId(str(n)),
            category=category, day=date(2026, 1, 1) + timedelta(days=day), usd=usd,
        )
        for n, day, usd, category in made
    )  # fmt: skip
    jobs = {JobId(str(n)): PaidJob(name="j", team=f"t{n}", owner="o") for n in range(2)}
    one = report(Paid(slices=slices, attempts={a.attempt.id: a for a in attempts}, jobs=jobs), by)
    assert one.total.usd == sum((s.usd for s in slices), ZERO) == sum((row.usd for row in one.rows), ZERO)
    for row in (*one.rows, one.total):
        assert row.usd == row.compute_usd + row.egress_usd + row.storage_usd
        assert ZERO <= row.lost_usd <= row.compute_usd + Decimal("0.000001")
    keys = [row.key for row in one.rows]
    assert len(keys) == len(set(keys))
    assert by not in ("day", "month") or keys == sorted(keys)
