"""Attempts of a job on one axis of time, in phases. Pure functions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from broker.domain.job import Attempt

WIDTH = 1000.0
"""Length of the axis in units of the drawing."""
MIN_WIDTH = 1.5
"""Length of the shortest phase that is drawn."""


@dataclass(frozen=True, kw_only=True)
class TimelinePhase:
    """One phase of an attempt, as a bar of the drawing."""

    name: str
    x: float
    width: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TimelineRow:
    number: int
    phases: tuple[TimelinePhase, ...]


def phases(attempt: Attempt, now: datetime) -> Iterator[tuple[str, datetime, datetime]]:
    """Yield (name, start, end) of each phase so far; a phase without a known start is part of the one before."""
    marks = [
        ("quote", attempt.created_at),
        ("buy", attempt.create_sent_at),
        ("boot", attempt.running_at or attempt.booted_at),
        ("train", attempt.first_beat_at),
        ("drain", attempt.draining_since),
        ("destroy", attempt.terminating_since),
    ]
    known_marks = [(name, at) for name, at in marks if at is not None]
    end = attempt.ended_at or now
    for place, (name, start) in enumerate(known_marks):
        until = known_marks[place + 1][1] if place + 1 < len(known_marks) else end
        if until > start:
            yield name, start, until


def timeline(attempts: Sequence[Attempt], now: datetime) -> list[TimelineRow]:
    """Return a row of bars for each attempt, all on the axis from the first attempt to the end of the last."""
    if not attempts:
        return []
    begin = min(a.created_at for a in attempts)
    end = max(a.ended_at or now for a in attempts)
    scale = WIDTH / max(1.0, (end - begin).total_seconds())
    rows = []
    for attempt in attempts:
        bars = tuple(
            TimelinePhase(
                name=name,
                x=round((start - begin).total_seconds() * scale, 2),
                width=round(max(MIN_WIDTH, (until - start).total_seconds() * scale), 2),
                seconds=(until - start).total_seconds(),
            )
            for name, start, until in phases(attempt, now)
        )
        rows.append(TimelineRow(number=attempt.number, phases=bars))
    return rows
