"""When a budget's window begins. Spending is kept by quarter-hours, and a window that begins within one has all of it:
what is counted is never less than what was spent.
"""

from datetime import UTC, datetime, timedelta, tzinfo

from broker.domain.policy import Budget, BudgetPeriod, Window

QUARTER = timedelta(minutes=15)
ROLLING = {
    BudgetPeriod.DAY: timedelta(days=1),
    BudgetPeriod.WEEK: timedelta(days=7),
    BudgetPeriod.MONTH: timedelta(days=30),
}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def quarter(at: datetime) -> datetime:
    """The quarter-hour of `at`, by its start, in UTC."""
    return at.astimezone(UTC) - (at - _EPOCH) % QUARTER


def window_start(budget: Budget, zone: tzinfo, now: datetime) -> datetime:
    """The first quarter-hour that counts against `budget` at `now`."""
    if budget.window is Window.ROLLING:
        return quarter(now - ROLLING[budget.per])
    return quarter(_first(budget.per, zone, now))


def window_end(budget: Budget, zone: tzinfo, now: datetime) -> datetime | None:
    """When everything spent is forgotten at once; None for a rolling window, which forgets bit by bit."""
    if budget.window is Window.ROLLING:
        return None
    # Longer than any period and shorter than two: within the next one, whose start is asked for.
    day = _first(budget.per, zone, now).astimezone(zone)
    ahead = {BudgetPeriod.DAY: 1, BudgetPeriod.WEEK: 7, BudgetPeriod.MONTH: 31}[budget.per]
    later = day.replace(tzinfo=None, hour=12) + timedelta(days=ahead)
    return _first(budget.per, zone, later.replace(tzinfo=zone))


def _first(per: BudgetPeriod, zone: tzinfo, now: datetime) -> datetime:
    """Local midnight that began the day, the week (Monday) or the month of `now`."""
    day = now.astimezone(zone).date()
    if per is BudgetPeriod.WEEK:
        day -= timedelta(days=day.weekday())
    elif per is BudgetPeriod.MONTH:
        day = day.replace(day=1)
    # fold=0: of two midnights the first, and one that a clock change skips is the moment of the change.
    return datetime(day.year, day.month, day.day, tzinfo=zone).astimezone(UTC)
