"""Durations and times as users write them, in every field and option that takes one."""

from datetime import UTC, datetime

import pytest
from pydantic import ValidationError

from broker.cli.core import durations
from broker.cli.core.exit_codes import BadInput
from broker.domain.spec import JobSpec
from trainer.contract.base import duration_s, moment

NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)
SCRIPT = {"name": "a", "cap_usd": 1, "script": {"code": "upload:" + "0" * 64, "command": ["a"]}}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("2h", 7200), ("7d", 604_800), ("1h30m", 5400), ("1.5h", 5400), ("2w", 1_209_600), ("5 min", 300)],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "90", "-2h", "2x", "30m1h", "1h1h", "yesterday", "1e3s", "٣h"])
def test_other_texts_are_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="write it as 90s, 15m, 2h, 1h30m or 7d"):
        duration_s(text)


def test_dates_are_in_utc_and_times_name_their_zone() -> None:
    assert moment("2026-11-01") == datetime(2026, 11, 1, tzinfo=UTC)
    assert moment("2026-11-01T02:00:00+02:00") == datetime(2026, 11, 1, tzinfo=UTC)
    for text in ("2026-11-01T12:00:00", "2026-13-01", "20261", "now"):
        with pytest.raises(ValueError, match="write it as 2026-01-31 or 2026-01-31T12:00:00Z"):
            moment(text)


def test_options_take_ages_dates_and_times() -> None:
    assert durations.past("--since", "7d", now=NOW) == "2026-11-21T12:00:00+00:00"
    assert durations.future("--expires", "1h30m", now=NOW) == datetime(2026, 11, 28, 13, 30, tzinfo=UTC)
    assert durations.past("--since", "2026-11-01", now=NOW) == "2026-11-01T00:00:00+00:00"
    assert durations.past("--since", None) is None
    assert durations.days("--history", "36h", max_days=90) == 2
    assert durations.seconds("--work", "90") == 90
    for text in ("yesterday", "90", "999999999w"):
        with pytest.raises(BadInput, match=f"^--since {text}: not a time; write it as 2h, 7d, 2026-01-31 or "):
            durations.past("--since", text, now=NOW)
    with pytest.raises(BadInput, match="write 1 to 90 days, as 7d"):
        durations.days("--history", "91d", max_days=90)


def test_every_time_of_a_spec_takes_a_duration() -> None:
    times = {
        "max_duration": "1h30m",
        "keep_on_failure": "15m",
        "deadline": "2026-12-01",
        "checkpoint": {"every_s": "10m"},
        "retention": {"logs_days": "12h", "artifacts_days": 3},
        "idle": {"window_s": "5m", "no_progress_s": 600, "download_s": "1h"},
    }
    spec = JobSpec.model_validate(SCRIPT | times)
    assert (spec.max_duration, spec.keep_on_failure, spec.checkpoint.every_s) == (5400, 900, 600)
    assert spec.deadline == datetime(2026, 12, 1, tzinfo=UTC)
    assert (spec.retention.logs_days, spec.retention.artifacts_days) == (0.5, 3)
    assert spec.idle is not None
    assert (spec.idle.window_s, spec.idle.no_progress_s, spec.idle.download_s) == (300, 600, 3600)
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert JobSpec.model_validate(SCRIPT).checkpoint.every_s == "auto"


def test_every_tenth_of_a_minute_and_an_hour_is_whole_seconds() -> None:
    tenths = range(20, 1000)
    for unit, tenth_s in (("m", 6), ("h", 360)):
        read = [JobSpec.model_validate(SCRIPT | {"max_duration": f"{t / 10}{unit}"}).max_duration for t in tenths]
        assert read == [t * tenth_s for t in tenths]
    assert duration_s("1.1h1.1m") == 4026


def test_a_number_as_text_is_a_number_of_seconds() -> None:
    spec = JobSpec.model_validate(SCRIPT | {"max_duration": "1_000", "checkpoint": {"every_s": "1e3"}})
    assert (spec.max_duration, spec.checkpoint.every_s) == (1000, 1000)


@pytest.mark.parametrize("value", ["soon", "2 fortnights"])
def test_wrong_durations_of_a_spec_come_with_an_example(value: str) -> None:
    with pytest.raises(ValidationError, match="is not a duration; write it as 90s, 15m, 2h, 1h30m or 7d"):
        JobSpec.model_validate(SCRIPT | {"max_duration": value})
