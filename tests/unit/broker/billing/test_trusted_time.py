"""A wall clock that was set is not used for money and deadlines; one that drifts is."""

from datetime import timedelta

import pytest

from broker.billing.trusted_time import (
    MAX_STEP_S,
    ClockAnchor,
    TrustedTime,
    is_other_step,
    judge_reading,
    step_message,
)
from tests.conformance.samples import START

HOUR, DAY = 3600.0, 86_400.0


def reading(wall_s: float, counted_s: float) -> ClockAnchor:
    return ClockAnchor(wall=START + timedelta(seconds=wall_s), counted_s=counted_s)


def test_the_first_reading_is_trusted() -> None:
    assert judge_reading(None, reading(7, 100)) == TrustedTime(anchor=reading(7, 100))


@pytest.mark.parametrize("off_s", [0.0, 0.4, -0.4, MAX_STEP_S, -MAX_STEP_S])
def test_a_small_difference_is_followed(off_s: float) -> None:
    """A failover to another server causes such a difference."""
    assert judge_reading(reading(0, 100), reading(15 + off_s, 115)) == TrustedTime(anchor=reading(15 + off_s, 115))


@pytest.mark.parametrize("step_s", [HOUR, -HOUR, DAY, -DAY, 365 * DAY])
def test_a_step_is_not_followed(step_s: float) -> None:
    anchor = reading(0, 100)
    assert judge_reading(anchor, reading(15 + step_s, 115)) == TrustedTime(anchor=anchor, step_s=step_s)
    assert judge_reading(anchor, reading(DAY + 30, 100 + DAY)) == TrustedTime(anchor=reading(DAY + 30, 100 + DAY))


def test_drift_during_a_long_outage_is_no_step() -> None:
    assert judge_reading(reading(0, 0), reading(7 * DAY + 200, 7 * DAY)).step_s == 0


def test_each_setting_of_the_clock_is_one_step() -> None:
    assert is_other_step(0, DAY)
    assert is_other_step(DAY, 0)
    assert is_other_step(DAY, -DAY)
    assert not is_other_step(DAY, DAY + 1)


@pytest.mark.parametrize(("step_s", "words"), [(DAY, "set 1 d 0 h ahead"), (-HOUR, "set 1 h 00 min back")])
def test_the_message_says_how_far_and_what_to_do(step_s: float, words: str) -> None:
    message = step_message(step_s) or ""
    assert words in message
    assert "set-ntp true" in message
    assert step_message(0) is None
