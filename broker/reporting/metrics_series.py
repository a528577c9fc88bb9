"""Time series of a run's steps from the trainer's journal `metrics.jsonl`, and their reduction for a plot."""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

MAX_LINES = 100_000
"""Lines of a journal that are read, about a second of CPU. A line of the trainer has over 80 bytes."""
MAX_STEP = 2**53 - 1
"""Largest step of a journal that is read. JSON's readers keep integers exact up to here."""
MAX_ATTEMPT = 2**31 - 1


class MetricPoint(NamedTuple):
    """One optimizer step. Missing or infinite values are None."""

    step: int
    attempt: int
    """Number of the attempt; 0: not recorded."""
    time: float | None
    """Seconds since 1970."""
    loss: float | None
    lr: float | None
    tokens_per_s: float | None


def metric_points(raw: bytes, after: int = 0) -> list[MetricPoint]:
    """Return the steps after `after` by step; a later line of a step replaces an earlier one.

    Only the last MAX_LINES lines are read.
    """
    by_step: dict[int, MetricPoint] = {}
    for line in raw.decode("utf-8", "replace").splitlines()[-MAX_LINES:]:
        try:
            row = json.loads(line)
            step = int(row["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
        if after < step <= MAX_STEP:
            by_step[step] = _point(step, row)
    return [by_step[step] for step in sorted(by_step)]


def _point(step: int, row: dict[str, Any]) -> MetricPoint:
    seconds, tokens = _number(row.get("seconds")), _number(row.get("tokens"))
    attempt = row.get("attempt")
    return MetricPoint(
        step=step,
        attempt=attempt if isinstance(attempt, int) and 0 <= attempt <= MAX_ATTEMPT else 0,
        time=_number(row.get("time")),
        loss=_number(row.get("loss")),
        lr=_number(row.get("lr")),
        tokens_per_s=_number(tokens / seconds) if tokens is not None and seconds else None,
    )


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def downsampled(points: Sequence[MetricPoint], max_points: int) -> list[MetricPoint]:
    """Return at most `max_points` points: the last of each equal share of steps, with its means of loss and speed."""
    if len(points) <= max_points:
        return list(points)
    shares = [points[i * len(points) // max_points : (i + 1) * len(points) // max_points] for i in range(max_points)]
    return [
        share[-1]._replace(
            loss=_mean_of([p.loss for p in share]), tokens_per_s=_mean_of([p.tokens_per_s for p in share])
        )
        for share in shares
    ]


def _mean_of(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return math.fsum(value / len(numbers) for value in numbers) if numbers else None
