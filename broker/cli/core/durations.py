"""Durations, times and lists of names as users write them in options."""

from collections.abc import Iterable
from datetime import UTC, datetime

from broker.cli.core.exit_codes import BadInput
from trainer.contract.base import DURATION_EXAMPLES, MOMENT_EXAMPLES, UNITS_S, duration_s, moment, moment_from

TIME_HELP = "2h, 7d, 2026-01-31 (UTC), or ISO 8601 with a zone"


def seconds(option: str, text: str, *, max_s: float = float("inf")) -> float:
    """Return `90`, `90s`, `1h30m` or `2d` in seconds. Raises BadInput."""
    try:
        value = duration_s(f"{text.strip()}s" if text.strip().isdecimal() else text)
    except ValueError:
        raise BadInput(f"{option} {text}: not a duration; write it as {DURATION_EXAMPLES}") from None
    if value > max_s:
        raise BadInput(f"{option} {text}: longer than {max_s / 3600:g}h; give a shorter time")
    return value


def days(option: str, text: str, *, max_days: int) -> int:
    """Return `7` or `7d` as a number of days, rounded up. Raises BadInput."""
    span = seconds(option, f"{text.strip()}d" if text.strip().isdecimal() else text)
    count = int(-(-span // UNITS_S["d"]))
    if not 1 <= count <= max_days:
        raise BadInput(f"{option} {text}: write 1 to {max_days} days, as 7d")
    return count


def past(option: str, text: str | None, *, now: datetime | None = None) -> str | None:
    """Return a time as ISO 8601: `2h` and `7d` are before now. None: no time. Raises BadInput."""
    return None if text is None else _at(option, text, -1, now).isoformat()


def future(option: str, text: str, *, now: datetime | None = None) -> datetime:
    """Return a time: `2h` and `7d` are after now. Raises BadInput."""
    return _at(option, text, 1, now)


def is_relative(text: str) -> bool:
    """Return whether a valid time depends on now, such as `2h`."""
    try:
        moment(text)
    except ValueError:
        return True
    return False


def _at(option: str, text: str, sign: int, now: datetime | None) -> datetime:
    try:
        return moment_from(text, now or datetime.now(UTC), sign)
    except ValueError:
        raise BadInput(f"{option} {text}: not a time; write it as 2h, 7d, {MOMENT_EXAMPLES}") from None


def names(texts: Iterable[str]) -> list[str]:
    """Return the names in comma-separated lists such as `H100,RTX4090`."""
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]
