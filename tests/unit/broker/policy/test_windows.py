"""Start times of budget periods, in every timezone, over every change of the clocks."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.policy import Budget, BudgetPeriod, Window
from broker.policy.windows import QUARTER, quarter, window_end, window_start

ZONES = sorted(name for name in available_timezones() if "/" in name)
zones = st.sampled_from(ZONES).map(ZoneInfo)
instants = st.integers(0, 35 * 366 * 86_400).map(lambda s: datetime(2000, 1, 1, tzinfo=UTC) + timedelta(seconds=s))
periods = st.sampled_from(BudgetPeriod)


def budget(per: BudgetPeriod | str, window: Window = Window.CALENDAR) -> Budget:
    return Budget(limit_usd=Decimal(1), per=BudgetPeriod(per), window=window)


def first_of(per: BudgetPeriod, now: datetime) -> object:
    """Return a value that all moments of one period share."""
    day = now.date()
    return (
        day if per is BudgetPeriod.DAY else day.isocalendar()[:2] if per is BudgetPeriod.WEEK else (day.year, day.month)
    )


@given(zones, instants, periods)
def test_a_calendar_window_holds_exactly_its_period(zone: ZoneInfo, now: datetime, per: BudgetPeriod) -> None:
    start, end = window_start(budget(per), zone, now), window_end(budget(per), zone, now)
    assert end is not None
    assert start <= now < end
    same = first_of(per, now.astimezone(zone))
    assert first_of(per, start.astimezone(zone)) == same
    assert first_of(per, (end - timedelta(microseconds=1)).astimezone(zone)) == same
    assert first_of(per, end.astimezone(zone)) != same
    assert first_of(per, (start - timedelta(microseconds=1)).astimezone(zone)) != same


@given(zones, instants, periods, st.sampled_from(Window))
def test_windows_begin_with_a_quarter_hour_and_never_go_back(
    zone: ZoneInfo, now: datetime, per: BudgetPeriod, window: Window
) -> None:
    one = budget(per, window)
    start = window_start(one, zone, now)
    assert start == quarter(start)
    assert window_start(one, zone, now + QUARTER) >= start


@given(instants, periods)
def test_a_rolling_window_is_rounded_against_the_spender(now: datetime, per: BudgetPeriod) -> None:
    length = {BudgetPeriod.DAY: 1, BudgetPeriod.WEEK: 7, BudgetPeriod.MONTH: 30}[per] * timedelta(days=1)
    start = window_start(budget(per, Window.ROLLING), UTC, now)
    assert length <= now - start < length + QUARTER
    assert window_end(budget(per, Window.ROLLING), UTC, now) is None


@pytest.mark.parametrize(
    ("zone", "per", "now", "start", "hours"),
    [
        ("Europe/Berlin", "day", "2026-03-29T10:00", "2026-03-28T23:00", 23),
        ("Europe/Berlin", "day", "2026-10-25T10:00", "2026-10-24T22:00", 25),
        ("Europe/Berlin", "week", "2026-03-27T10:00", "2026-03-22T23:00", 7 * 24 - 1),
        ("Europe/Berlin", "month", "2026-03-31T21:59", "2026-02-28T23:00", 31 * 24 - 1),
        ("Asia/Kathmandu", "day", "2026-01-01T12:00", "2025-12-31T18:15", 24),
        ("Asia/Beirut", "day", "2026-03-29T12:00", "2026-03-28T22:00", 23),  # midnight itself is skipped
        ("America/Havana", "day", "2026-11-01T12:00", "2026-11-01T04:00", 25),  # midnight comes twice
        ("UTC", "week", "2026-03-02T00:00", "2026-03-02T00:00", 168),
        ("UTC", "month", "2026-02-28T23:59", "2026-02-01T00:00", 28 * 24),
    ],
)
def test_days_with_a_change_of_the_clocks(zone: str, per: str, now: str, start: str, hours: int) -> None:
    at, one = datetime.fromisoformat(now).replace(tzinfo=UTC), budget(per)
    begins, ends = window_start(one, ZoneInfo(zone), at), window_end(one, ZoneInfo(zone), at)
    assert ends is not None
    assert (begins, ends - begins) == (datetime.fromisoformat(start).replace(tzinfo=UTC), timedelta(hours=hours))
