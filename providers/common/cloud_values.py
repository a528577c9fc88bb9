"""Readers of values in clouds' answers, which give one fact as a number, as its text, or as null.

All providers use them, so that an unusual form costs at most the fact, and never becomes another fact.
"""

from datetime import UTC, datetime
from decimal import Decimal
from math import isfinite

MILLISECONDS_FROM = 1e11
"""Smallest time of the epoch that is read as milliseconds: as seconds it would be in the year 5138."""
EARLIEST = datetime(2015, 1, 1, tzinfo=UTC)
"""Earliest plausible time of an answer. An earlier one, such as 0, means a missing value."""
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def number(value: object) -> float | None:
    """Return a finite number, also from its text; None: missing, or no number. A boolean is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        return None
    try:
        result = float(value)
    except (ValueError, OverflowError):
        return None
    return result if isfinite(result) else None


def as_integer(value: object) -> int | None:
    """Return a whole number, also from its text; None: missing, or no whole number."""
    result = number(value)
    return int(result) if result is not None and result.is_integer() else None


def positive(value: object) -> float | None:
    """Return a number above 0, also from its text; None: missing, or not measured."""
    result = number(value)
    return result if result is not None and result > 0 else None


def money(value: object) -> Decimal | None:
    """Return an amount of 0 or more, also from its text; None: missing. Raises ValueError for any other value."""
    if value is None:
        return None
    result = number(value)
    if result is None or result < 0:
        raise ValueError(f"{str(value)[:40]!r} is not an amount of money")
    return Decimal(str(value).strip())


def flag(value: object) -> bool | None:
    """Return a truth value, also from its text or from 0 and 1; None: missing, or neither."""
    if isinstance(value, bool):
        return value
    return _FLAGS.get(str(value).strip().lower()) if isinstance(value, int | str) else None


def text(value: object) -> str | None:
    """Return a text or a number as a text without outer spaces; None: missing, empty, or another value."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    return str(value).strip() or None


def moment(value: object) -> datetime | None:
    """Return a time given as seconds or milliseconds of the epoch, or by ISO 8601; None: missing or implausible."""
    seconds = number(value)
    try:
        if seconds is not None:
            seconds /= 1000 if seconds >= MILLISECONDS_FROM else 1
            then = datetime.fromtimestamp(seconds, UTC)
        else:
            then = datetime.fromisoformat(value.strip()) if isinstance(value, str) else EARLIEST
            then = then.replace(tzinfo=then.tzinfo or UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return then if then > EARLIEST else None
