"""Periods of digests, their times, and their contents."""

from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.ids import AttemptId, JobId
from broker.domain.job import Attempt, AttemptState, Reason
from broker.domain.money import ZERO, LedgerCategory
from broker.domain.spending import Paid, PaidAttempt, PaidJob, Slice, SpendWindow
from broker.reporting.digest import DigestPeriod, DigestPlan, RunningJob, digests, periods
from tests.support.build import at, attempt, job, line

BERLIN = ZoneInfo("Europe/Berlin")
PLAN = DigestPlan(zone="Europe/Berlin")
HOUR = 3600.0
EARLY, LATE = (datetime(year, 1, 1) for year in (2020, 2040))  # noqa: DTZ001 (hypothesis adds the zone)
PERIOD = DigestPeriod(
    every="daily",
    window=SpendWindow(
        since=datetime(2026, 3, 1, tzinfo=BERLIN), until=datetime(2026, 3, 2, tzinfo=BERLIN), zone="Europe/Berlin"
    ),
)


def labels(now: datetime, plan: DigestPlan = PLAN) -> list[tuple[str, str]]:
    return [(period.every, period.label) for period in periods(plan, now)]


def test_the_day_before_is_reported_in_the_morning_of_its_zone() -> None:
    assert labels(datetime(2026, 3, 3, 8, 59, tzinfo=BERLIN))[0] == ("daily", "2026-03-01")
    assert labels(datetime(2026, 3, 3, 9, 0, tzinfo=BERLIN))[0] == ("daily", "2026-03-02")
    assert labels(datetime(2026, 3, 3, 8, 0, tzinfo=UTC))[0] == ("daily", "2026-03-02")


def test_the_week_before_is_reported_on_monday() -> None:
    assert labels(datetime(2026, 3, 2, 8, 59, tzinfo=BERLIN))[1] == ("weekly", "2026-02-16 to 2026-02-22")
    assert labels(datetime(2026, 3, 2, 9, 0, tzinfo=BERLIN))[1] == ("weekly", "2026-02-23 to 2026-03-01")
    assert labels(datetime(2026, 3, 8, 23, 0, tzinfo=BERLIN))[1] == ("weekly", "2026-02-23 to 2026-03-01")


@pytest.mark.parametrize(
    ("daily", "weekly", "told"), [(True, False, ["daily"]), (False, True, ["weekly"]), (False, False, [])]
)
def test_each_may_be_left_out(daily: bool, weekly: bool, told: list[str]) -> None:
    plan = replace(PLAN, daily=daily, weekly=weekly)
    assert [period.every for period in periods(plan, datetime(2026, 3, 2, 12, tzinfo=UTC))] == told


def test_a_day_on_which_clocks_change_has_another_length() -> None:
    (day, _) = periods(PLAN, datetime(2026, 3, 30, 12, tzinfo=BERLIN))
    assert day.window.until.astimezone(UTC) - day.window.since.astimezone(UTC) == timedelta(hours=23)


@given(
    st.datetimes(EARLY, LATE, timezones=st.just(UTC)),
    st.sampled_from(["UTC", "Europe/Berlin", "America/Los_Angeles", "Asia/Kolkata", "Pacific/Apia"]),
    st.times(),
)
def test_reported_periods_are_over_and_adjacent(now: datetime, zone: str, told_at: time) -> None:
    plan = DigestPlan(zone=zone, at=told_at.replace(tzinfo=None, fold=0))
    day, week = periods(plan, now)
    assert day.window.since < day.window.until <= now
    assert week.window.since < week.window.until <= now
    later, _ = periods(plan, now + timedelta(hours=23))  # as long as a day is at the least
    assert later.window.since in (day.window.since, day.window.until) or zone == "Pacific/Apia"


def test_a_digest_says_what_was_spent_lost_and_saved_and_what_runs() -> None:
    done = attempt(
        AttemptState.ENDED, reason=Reason.COMPLETED, first_beat_at=at(0), absent_at=at(HOUR), ended_at=at(HOUR),
        charged_to=at(HOUR), line=line(spot=True, on_demand_usd_per_hour=Decimal("2")),
    )  # fmt: skip
    lost = replace(done, id=AttemptId("b"), reason=Reason.NO_CAPACITY, first_beat_at=None)
    one = paid_by("nlp", "ann", (done, "0.5"), (lost, "0.25"))
    running = RunningJob(job=job(team="nlp"), attempt=attempt(AttemptState.TRAINING))
    (notice,) = digests(PERIOD, one, [running])
    assert (notice.id, notice.kind, notice.team) == ("digest-daily-2026-03-02-nlp", "digest.daily", "nlp")
    assert notice.message == (
        "nlp, 2026-03-01: $0.7500 spent, $0.2500 of it lost work, $1.2500 saved against on-demand prices; 1 running now"
    )
    assert (notice.data["spent_usd"], notice.data["lost_usd"]) == ("0.75", "0.250000")
    assert notice.data["users"] == [{"user": "nlp/ann", "usd": "0.75"}]
    assert [(row["name"], row["owner"], row["usd"]) for row in notice.data["jobs"]] == [("tune", "ann", "0.75")]
    assert notice.data["running_jobs"] == 1
    assert Decimal(notice.data["usd_per_hour"]) == running.attempt.line.offer.usd_per_hour


def test_dearer_than_on_demand_is_reported_as_well() -> None:
    lost = attempt(
        AttemptState.ENDED, reason=Reason.NO_CAPACITY, absent_at=at(HOUR), ended_at=at(HOUR), charged_to=at(HOUR)
    )
    (notice,) = digests(PERIOD, paid_by("nlp", "ann", (lost, "0.25")), [])
    assert "$0.2500 more than on-demand prices; 0 running now" in notice.message


def test_teams_get_their_own_digest_and_the_installation_all() -> None:
    first = attempt(AttemptState.ENDED, reason=Reason.COMPLETED, ended_at=at(HOUR))
    one = paid_by("nlp", "ann", (first, "1"))
    running = RunningJob(job=job(team="vision"), attempt=attempt(AttemptState.TRAINING))
    found = digests(PERIOD, one, [running])
    assert [(notice.team, notice.data["spent_usd"], notice.data["running_jobs"]) for notice in found] == [
        ("nlp", "1", 0),
        ("vision", "0", 1),
        (None, "1", 1),
    ]
    assert found[2].id == "digest-daily-2026-03-02-"
    assert found[2].message.startswith("all teams, 2026-03-01: $1.0000 spent")


def test_an_empty_period_gives_no_digest() -> None:
    assert digests(PERIOD, Paid(slices=(), attempts={}, jobs={}), []) == []


def test_only_the_dearest_are_named() -> None:
    slices = tuple(
        Slice(
            job_id=JobId(str(n)), attempt_id=None, category=LedgerCategory.STORAGE, day=date(2026, 3, 1), usd=Decimal(n)
        )
        for n in range(1, 9)
    )
    jobs = {JobId(str(n)): PaidJob(name=f"j{n}", team="nlp", owner=f"o{n}") for n in range(1, 9)}
    (notice,) = digests(PERIOD, Paid(slices=slices, attempts={}, jobs=jobs), [])
    assert [row["id"] for row in notice.data["jobs"]] == ["8", "7", "6", "5", "4"]
    assert len(notice.data["users"]) == 5
    assert notice.data["spent_usd"] == "36"


def paid_by(team: str, owner: str, *made: tuple[Attempt, str]) -> Paid:
    attempts = {}
    slices = []
    for one, usd in made:
        attempts[one.id] = PaidAttempt(attempt=one, compute_usd=Decimal(usd))
        slices.append(
            Slice(
                job_id=one.job_id,
                attempt_id=one.id,
                category=LedgerCategory.COMPUTE,
                day=date(2026, 3, 1),
                usd=Decimal(usd),
            )
        )
    jobs = {slices[0].job_id: PaidJob(name="tune", team=team, owner=owner)} if slices else {}
    assert sum((piece.usd for piece in slices), ZERO) > 0
    return Paid(slices=tuple(slices), attempts=attempts, jobs=jobs)
