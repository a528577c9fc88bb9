"""Decision about the charge of a live attempt, and about the signal that ends it, from facts."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.instance import Caps
from broker.domain.job import Attempt, AttemptState, PriceChange, Signal
from broker.domain.money import ZERO
from broker.lifecycle.decisions.charge_decision import (
    PROOF_S,
    ChargeDecision,
    ChargeFacts,
    charge_event,
    charged_until,
    decide_charge,
)
from tests.support import build

CAPS = Caps(spot=True, list_lag_s=5)
STATES = st.sampled_from(
    [AttemptState.LAUNCHING, AttemptState.BOOTING, AttemptState.TRAINING, AttemptState.DRAINING,
     AttemptState.TERMINATING]
)  # fmt: skip
SECONDS = st.integers(0, 20_000)


def facts(attempt: Attempt, now_s: float, job: dict[str, Any] | None = None, **changes: Any) -> ChargeFacts:
    values: dict[str, Any] = {
        "job": build.active_job(**{"cap_usd": Decimal(1000)} | (job or {})), "attempt": attempt, "caps": CAPS,
        "drain_budget": build.drain_budget(), "now": build.at(now_s),
    }  # fmt: skip
    return ChargeFacts(**values | changes)


def written(decision: ChargeDecision) -> Attempt:
    """Return the attempt as the store has it after the write."""
    attempt = decision.attempt
    return replace(
        attempt, charged_to=decision.to, charged_usd=attempt.charged_usd + decision.usd + decision.traffic_usd,
        traffic_usd=attempt.traffic_usd + decision.traffic_usd, prices=(*attempt.prices, *decision.prices),
        signal=attempt.signal or decision.signal,
    )  # fmt: skip


@given(state=STATES, first_s=SECONDS, second_s=SECONDS, is_listed=st.booleans())
def test_a_charge_is_final_and_repeating_it_charges_nothing(
    state: AttemptState, first_s: int, second_s: int, is_listed: bool
) -> None:
    """A repeated decision charges nothing, even with an earlier clock."""
    attempt = build.attempt(state, running_at=build.at(0))
    first = decide_charge(facts(attempt, first_s, is_listed=is_listed))
    if first is not None:
        assert first.usd >= ZERO
        attempt = written(first)
        assert decide_charge(facts(attempt, first_s, is_listed=is_listed)) is None
    second = decide_charge(facts(attempt, second_s, is_listed=is_listed))
    if second is not None:
        assert second.usd >= ZERO
        assert attempt.charged_to is None or second.to >= attempt.charged_to


@given(moments=st.lists(SECONDS, min_size=1, max_size=6), state=STATES)
def test_the_number_of_charges_does_not_change_their_sum(moments: list[int], state: AttemptState) -> None:
    attempt = once = build.attempt(state, running_at=build.at(0))
    for now_s in moments:
        decision = decide_charge(facts(attempt, now_s))
        attempt = attempt if decision is None else written(decision)
    decision = decide_charge(facts(once, max(moments)))
    assert attempt.charged_usd == (ZERO if decision is None else written(decision).charged_usd)


@given(now_s=SECONDS, missing_s=SECONDS, stopped_s=st.none() | SECONDS)
def test_missing_machines_are_charged_no_further(now_s: int, missing_s: int, stopped_s: int | None) -> None:
    attempt = build.attempt(AttemptState.TRAINING, booted_at=build.at(0), charged_to=build.at(7))
    stopped = None if stopped_s is None else build.at(stopped_s)
    known = facts(attempt, now_s, missing_at=build.at(missing_s), self_stopped_by=stopped)
    until = charged_until(known)
    if stopped is not None and stopped < known.now:
        assert until == attempt.charged_to
    else:
        assert until == min(known.now, build.at(missing_s))


def test_a_machine_in_destruction_is_charged_later_by_the_time_of_a_proof() -> None:
    attempt = build.attempt(AttemptState.TERMINATING)
    assert charged_until(facts(attempt, 100)) == build.at(100) - timedelta(seconds=CAPS.list_lag_s + PROOF_S)


def test_an_unanswered_create_is_charged_once_it_is_listed() -> None:
    attempt = build.attempt(AttemptState.LAUNCHING)
    assert decide_charge(facts(attempt, 100, is_listed=False)) is None
    decision = decide_charge(facts(attempt, 100))
    assert decision is not None
    assert decision.usd > 0


def test_machines_that_ran_alone_are_not_charged_before_their_end() -> None:
    attempt = build.attempt(AttemptState.TRAINING, booted_at=build.at(1))
    known = facts(attempt, 100, missing_at=build.at(90), self_stopped_by=build.at(50))
    assert charged_until(known) == attempt.create_sent_at
    assert charged_until(replace(known, attempt=replace(attempt, create_sent_at=None))) == known.now


@pytest.mark.parametrize(
    ("job", "signal", "kind", "message"),
    [
        ({"cap_usd": Decimal("0.01")}, Signal.CAP, "job.cap_near", "spent: checkpoint and stop"),
        ({"spec": build.spec(max_duration=120)}, Signal.OUT_OF_TIME, "job.out_of_time", "max_duration of 120 s"),
    ],
)
def test_a_used_up_limit_raises_its_signal_once(job: dict[str, Any], signal: Signal, kind: str, message: str) -> None:
    decision = decide_charge(facts(build.attempt(), 100, job))
    assert decision is not None
    assert decision.signal is signal
    event = charge_event(decision)
    assert event is not None
    assert (event.kind, event.attempt_id) == (kind, build.attempt().id)
    assert message in event.message
    assert decide_charge(facts(written(decision), 100, job)) is None


def test_a_changed_price_is_recorded_even_if_nothing_is_owed() -> None:
    attempt = build.attempt(charged_to=build.at(0))
    change = PriceChange(since=build.at(0), usd_per_hour=Decimal(5))
    decision = decide_charge(facts(attempt, 0, prices=(change,)))
    assert decision is not None
    assert (decision.usd, decision.prices, decision.signal) == (ZERO, (change,), None)
    assert charge_event(decision) is None
