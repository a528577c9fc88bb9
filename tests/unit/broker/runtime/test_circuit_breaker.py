"""A cloud's word is obeyed within bounds, and its silence counts only in a row."""

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.runtime.circuit_breaker import (
    PAUSE_MAX_S,
    SILENT,
    BreakerState,
    after_answer,
    after_silence,
    after_throttled,
)


@given(st.floats(0, 1e6), st.floats(0, 60), st.floats(0, 1e6))
def test_a_pause_is_as_long_as_asked_for_and_never_for_ever(asked_s: float, jitter_s: float, now: float) -> None:
    pace = after_throttled(BreakerState(), now, asked_s=asked_s, jitter_s=jitter_s)
    assert min(PAUSE_MAX_S, asked_s) <= pace.again_at - now + 1e-6
    assert pace.wait_s(now) <= PAUSE_MAX_S + 1e-6
    assert pace.wait_s(now + PAUSE_MAX_S + 1) == 0


def test_a_shorter_pause_does_not_end_a_longer_one() -> None:
    long = after_throttled(BreakerState(), 0, asked_s=60, jitter_s=0)
    both = after_throttled(long, 1, asked_s=1, jitter_s=0)
    assert both.again_at == 60
    assert both.throttled == 2


def test_consecutive_unanswered_calls_open_the_circuit() -> None:
    pace = BreakerState()
    for _ in range(SILENT - 1):
        pace = after_silence(pace)
    assert not pace.broken
    assert after_silence(pace).broken
    assert not after_silence(after_answer(pace)).broken
    assert not after_silence(after_throttled(pace, 0, asked_s=1, jitter_s=0)).broken


@pytest.mark.parametrize("heard", [after_answer, partial(after_throttled, now=0, asked_s=1, jitter_s=0)])
def test_failures_after_an_answer_count_from_the_first(heard: Callable[[BreakerState], BreakerState]) -> None:
    pace = heard(BreakerState(silent=SILENT - 1))
    for _ in range(SILENT - 1):
        pace = after_silence(pace)
    assert not pace.broken
    assert after_silence(pace).broken


def test_only_the_last_refused_caller_yields_to_others() -> None:
    refused = after_throttled(BreakerState(), 0, asked_s=10, jitter_s=0)
    assert refused.wait_s(0, yields_s=5) == 15
    answered = after_answer(refused)
    assert answered.wait_s(0, yields_s=5) == 10
    assert after_throttled(answered, 0, asked_s=1, jitter_s=0).throttled == 1, "in a row"
