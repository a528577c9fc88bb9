"""Every signal means an event that the lifecycle knows, and people come first."""

import pytest

from broker.domain.job import AttemptState, Signal
from broker.lifecycle.signals import SIGNALS, required_end
from broker.lifecycle.state_machine import AttemptEvent, Rule, attempt_rule
from tests.support import build


def test_a_stop_is_obeyed_before_any_signal() -> None:
    attempt = build.attempt(signal=Signal.CAP)
    assert required_end(attempt, build.active_job()) is AttemptEvent.CAP
    assert required_end(attempt, build.active_job(stop_requested=True)) is AttemptEvent.STOP
    assert required_end(build.attempt(), build.active_job()) is None


@pytest.mark.parametrize("signal", Signal)
def test_each_signal_ends_a_training_attempt_with_its_reason(signal: Signal) -> None:
    meaning = SIGNALS[signal]
    rule = attempt_rule(AttemptState.TRAINING, meaning.event)
    assert isinstance(rule, Rule)
    assert rule.reason is meaning.reason
