"""Windows of budgets.

Spending is stored by quarter-hours. A window that begins within a quarter-hour includes all of it, so that spending is
never counted too low.
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
    """Return the start of the quarter-hour of `at`, in UTC."""
    return at.astimezone(UTC) - (at - _EPOCH) % QUARTER


def window_start(budget: Budget, zone: tzinfo, now: datetime) -> datetime:
    """Return the first quarter-hour that counts against `budget` at `now`."""
    if budget.window is Window.ROLLING:
        return quarter(now - ROLLING[budget.per])
    return quarter(_window_start(budget.per, zone, now))


def window_end(budget: Budget, zone: tzinfo, now: datetime) -> datetime | None:
    """Return the time when all spending leaves the window; None: a rolling window, which it leaves gradually."""
    if budget.window is Window.ROLLING:
        return None
    # A date within the next period: longer than any period and shorter than two.
    day = _window_start(budget.per, zone, now).astimezone(zone)
    ahead = {BudgetPeriod.DAY: 1, BudgetPeriod.WEEK: 7, BudgetPeriod.MONTH: 31}[budget.per]
    later = day.replace(tzinfo=None, hour=12) + timedelta(days=ahead)
    return _window_start(budget.per, zone, later.replace(tzinfo=zone))


def _window_start(per: BudgetPeriod, zone: tzinfo, now: datetime) -> datetime:
    """Return the local midnight at the start of the day, the week (Monday) or the month of `now`."""
    day = now.astimezone(zone).date()
    if per is BudgetPeriod.WEEK:
        day -= timedelta(days=day.weekday())
    elif per is BudgetPeriod.MONTH:
        day = day.replace(day=1)
    # fold=0: the first of two midnights; a midnight that a clock change skips is the moment of the change.
    return datetime(day.year, day.month, day.day, tzinfo=zone).astimezone(UTC)
