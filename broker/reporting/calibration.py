"""Judges forecasts by the results of finished jobs: money, time and memory.

`gpubroker calibration` shows the report, and quotes name the record of their evidence tier.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from broker.domain.spending import (
    UNKNOWN,
    CalibrationBy,
    CalibrationReport,
    CalibrationRow,
    FinishedJob,
    ForecastRecord,
    error_text,
    within_text,
)
from broker.domain.workload import SpeedTier


@dataclass(frozen=True, kw_only=True)
class _JudgedForecast:
    """One forecast with its result. `error` is None where the result has no number, as after running out of memory."""

    is_within: bool
    error: float | None


def _judged(result: float, p50: float, p90: float) -> _JudgedForecast:
    return _JudgedForecast(is_within=result <= p90, error=abs(result / p50 - 1) if p50 > 0 else None)


def _money(job: FinishedJob) -> _JudgedForecast | None:
    if job.usd_p50 is None or job.usd_p90 is None:
        return None
    return _judged(float(job.spent_usd), float(job.usd_p50 - job.bucket_usd), float(job.usd_p90 - job.bucket_usd))


def _time(job: FinishedJob) -> _JudgedForecast | None:
    if job.hours_p50 is None or job.hours_p90 is None or job.hours is None:
        return None
    return _judged(job.hours, job.hours_p50, job.hours_p90)


def _memory(job: FinishedJob) -> _JudgedForecast | None:
    """Judge the estimate of memory. The P90 is the required size: the estimate with its margin."""
    need = job.memory
    if need is None or job.emulated:
        return None
    if job.out_of_memory:
        return _JudgedForecast(is_within=False, error=None)
    if job.peak_bytes is None:
        return None
    outside = need.context if job.gpus else 0  # a process on a CPU contains its context
    return _judged(job.peak_bytes + outside, need.peak + need.context, need.required)


def _record(judged: Sequence[_JudgedForecast | None]) -> ForecastRecord:
    known = [forecast for forecast in judged if forecast is not None]
    errors = [forecast.error for forecast in known if forecast.error is not None]
    return ForecastRecord(
        judged=len(known),
        within=sum(forecast.is_within for forecast in known),
        median_error=median(errors) if errors else None,
    )


def _gpu(job: FinishedJob) -> str:
    return f"{job.accelerator} (simulated)" if job.simulated else job.accelerator


def _recipe(job: FinishedJob) -> str:
    """Return the recipe of a job: our trainer with its method and task. The recipe of a script is unknown."""
    if job.method == "script":
        return UNKNOWN
    return f"gpubroker {job.method}" if job.task == "causal_lm" else f"gpubroker {job.method} {job.task}"


_KEYS: Mapping[CalibrationBy, Callable[[FinishedJob], str]] = {
    "tier": lambda job: job.tier or UNKNOWN,
    "gpu": _gpu,
    "recipe": _recipe,
    "family": lambda job: job.family or UNKNOWN,
}


def calibrate(jobs: Sequence[FinishedJob]) -> CalibrationReport:
    """Return the record of all jobs and of each group."""
    rows: list[CalibrationRow] = []
    for by, key_of in _KEYS.items():
        groups: dict[str, list[FinishedJob]] = defaultdict(list)
        for job in jobs:
            groups[key_of(job)].append(job)
        ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
        rows += [_row(by, key, members) for key, members in ordered]
    return CalibrationReport(rows=tuple(rows), total=_row("all", "all", jobs))


def _row(by: CalibrationBy | Literal["all"], key: str, jobs: Sequence[FinishedJob]) -> CalibrationRow:
    return CalibrationRow(
        by=by,
        key=key,
        jobs=len(jobs),
        money=_record([_money(job) for job in jobs]),
        time=_record([_time(job) for job in jobs]),
        memory=_record([_memory(job) for job in jobs]),
    )


def tier_records(jobs: Sequence[FinishedJob]) -> Mapping[tuple[SpeedTier, bool], str]:
    """Return the record of each tier in words, for quotes. The flag of a key separates simulated offers from rented."""
    groups: dict[tuple[SpeedTier, bool], list[FinishedJob]] = defaultdict(list)
    for job in jobs:
        if job.tier is not None:
            groups[job.tier, job.simulated].append(job)
    texts = {key: _tier_text([_time(job) for job in members]) for key, members in groups.items()}
    return {key: text for key, text in texts.items() if text}


def _tier_text(judged: Sequence[_JudgedForecast | None]) -> str:
    record = _record(judged)
    if not record.judged:
        return ""
    held = within_text(record.judged, record.within)
    return f"{held} finished jobs of this tier within P90, median error of time {error_text(record.median_error)}"
