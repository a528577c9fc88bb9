"""Decides whether a reading of the database's clock is trusted, for charges, caps and deadlines.

A wall clock can be set to any time; the time that a host counts since its boot cannot. Where both disagree, the broker
continues on the counted time: see "One clock" in docs/design/architecture.md. `DatabaseClock` calls the rule.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from broker.domain.formatting import duration

MAX_STEP_S = 10.0
"""Largest difference in seconds between wall and counted time that is accepted, as after a failover of the database."""
DRIFT = 5e-4
"""Share by which the two may drift apart: the fastest correction of NTP."""


@dataclass(frozen=True, kw_only=True)
class ClockAnchor:
    """Trusted wall time at one moment of the counted time."""

    wall: datetime
    counted_s: float
    """Seconds that this host counted since its boot."""

    def at(self, counted_s: float) -> datetime:
        """Return the wall time at another moment of the counted time."""
        return self.wall + timedelta(seconds=counted_s - self.counted_s)


@dataclass(frozen=True, kw_only=True)
class TrustedTime:
    """Result of a reading."""

    anchor: ClockAnchor
    step_s: float = 0.0
    """Seconds by which the wall clock is ahead of the trusted time (negative: behind); 0: it is trusted."""


def judge_reading(anchor: ClockAnchor | None, reading: ClockAnchor) -> TrustedTime:
    """Return the anchor after a reading of the wall clock: the reading, or the earlier anchor after a step.

    `anchor`: the latest trusted reading; None: the first reading, which is trusted.
    """
    if anchor is None:
        return TrustedTime(anchor=reading)
    counted_s = max(0.0, reading.counted_s - anchor.counted_s)
    step_s = (reading.wall - anchor.at(reading.counted_s)).total_seconds()
    if abs(step_s) <= MAX_STEP_S + DRIFT * counted_s:
        return TrustedTime(anchor=reading)
    return TrustedTime(anchor=anchor, step_s=step_s)


def is_other_step(before_s: float, after_s: float) -> bool:
    """Return True if the wall clock was set between two readings, to a wrong or to the right time."""
    return abs(after_s - before_s) > MAX_STEP_S


def step_message(step_s: float) -> str | None:
    """Return one line about a clock that was set `step_s` seconds ahead (negative: back); None: it is trusted."""
    if not step_s:
        return None
    direction = "ahead" if step_s > 0 else "back"
    return (
        f"the database's clock was set {duration(abs(step_s))} {direction}; charges, caps and deadlines ignore that; "
        "set the clock of the database's host right (timedatectl set-ntp true)"
    )
