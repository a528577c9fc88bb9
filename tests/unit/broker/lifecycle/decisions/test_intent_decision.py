"""Decision whether the create of a planned attempt is sent."""

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.job import AttemptState, JobState, Reason, Signal
from broker.domain.money import LedgerKind
from broker.lifecycle.decisions.intent_decision import (
    IntentDecision,
    IntentFacts,
    IntentOutcome,
    decide_intent,
    end_before_create,
    intent_events,
)
from broker.lifecycle.decisions.launch_decision import CREATE_POLL_S
from broker.lifecycle.state_machine import AttemptEvent
from tests.support import build

PLANNED = build.attempt(AttemptState.PLANNED, reserved_usd=Decimal(7), detail="sold out meanwhile")
OFFER = PLANNED.line.offer
TTL_S = 300.0


def facts(now_s: float = 10, *, job: dict[str, Any] | None = None, **changes: Any) -> IntentFacts:
    values: dict[str, Any] = {
        "job": build.active_job(**job or {}), "attempt": PLANNED, "now": build.at(now_s), "launcher_id": "host-1",
        "quote_ttl_s": TTL_S, "price_rise": Decimal("0.02"), "latest": OFFER, "offers_at": None,
    }  # fmt: skip
    return IntentFacts(**values | changes)


def decide(now_s: float = 10, **changes: Any) -> IntentDecision:
    return decide_intent(facts(now_s, **changes))


@given(
    now_s=st.integers(0, 1000),
    stop=st.booleans(),
    signal=st.none() | st.sampled_from([Signal.CAP, Signal.OUT_OF_TIME, Signal.BUDGET]),
    forbidden=st.sampled_from(["", "images are not allowed"]),
    was_sent=st.booleans(),
    is_superseded=st.booleans(),
    unreadable=st.sampled_from(["", "timeout"]),
)
def test_a_create_is_sent_only_without_an_obstacle(
    now_s: int, stop: bool, signal: Signal | None, forbidden: str, was_sent: bool, is_superseded: bool, unreadable: str
) -> None:
    attempt = replace(PLANNED, signal=signal)
    known = facts(
        now_s, attempt=attempt, forbidden=forbidden, was_sent=was_sent, is_superseded=is_superseded,
        unreadable=unreadable, job={"stop_requested": stop},
    )  # fmt: skip
    decision = decide_intent(known)
    assert decision.before == attempt
    obstacles = stop or signal is not None or forbidden or now_s > TTL_S or was_sent or is_superseded or unreadable
    assert (decision.outcome is IntentOutcome.SEND) is not bool(obstacles)
    if decision.outcome is IntentOutcome.END:
        assert not was_sent
        assert decision.attempt.state is AttemptState.ENDED
        assert decision.job.state is not JobState.ACTIVE
        assert [(entry.kind, entry.usd) for entry in decision.ledger] == [(LedgerKind.RELEASE, Decimal(7))]
        assert len(intent_events(decision)) == 1
    else:
        assert (decision.job, decision.ledger, intent_events(decision)) == (known.job, (), ())
        assert decision.due_in_s == CREATE_POLL_S


def test_a_create_sent_before_the_backup_is_charged_from_the_planning() -> None:
    decision = decide(50, was_sent=True, job={"stop_requested": True})
    assert decision.outcome is IntentOutcome.LOOK_UP
    assert (decision.attempt.state, decision.attempt.detail) == (AttemptState.LAUNCHING, "")
    assert (decision.attempt.create_sent_at, decision.attempt.launched_by) == (PLANNED.created_at, "host-1")


def test_a_create_is_charged_from_now() -> None:
    decision = decide(50)
    assert (decision.outcome, decision.attempt.create_sent_at) == (IntentOutcome.SEND, build.at(50))


def test_an_unreadable_store_leaves_the_attempt_planned() -> None:
    decision = decide(unreadable="timeout")
    assert (decision.outcome, decision.attempt.state) == (IntentOutcome.WAIT, AttemptState.PLANNED)
    assert decision.attempt.detail.endswith("whether its create was sent: timeout")


@pytest.mark.parametrize(
    ("known", "event", "message"),
    [
        (facts(job={"stop_requested": True}), AttemptEvent.STOP, AttemptEvent.STOP.value),
        (
            facts(attempt=replace(PLANNED, signal=Signal.OUT_OF_TIME), job={"spec": build.spec(max_duration=60)}),
            AttemptEvent.OUT_OF_TIME,
            "its max_duration of 60 s is reached",
        ),
        (facts(forbidden="not here"), AttemptEvent.QUOTE_EXPIRED, "not here"),
        (facts(TTL_S + 1), AttemptEvent.QUOTE_EXPIRED, "its quote is 301 s old; sold out meanwhile"),
        (facts(latest=None, offers_at=build.at(5)), AttemptEvent.QUOTE_EXPIRED, "is no longer offered"),
    ],
)
def test_an_end_before_the_create_names_its_cause(known: IntentFacts, event: AttemptEvent, message: str) -> None:
    end = end_before_create(known)
    assert end is not None
    assert end[0] is event
    assert message in end[1]
    (reported,) = intent_events(decide_intent(known))
    assert reported.message == f"attempt 1 ended before launch: {end[1]}"


def test_an_attempt_superseded_by_another_ends() -> None:
    decision = decide(is_superseded=True)
    assert decision.attempt.reason is Reason.QUOTE_EXPIRED
    assert decision.attempt.detail.startswith("another attempt was bought after the backup")
