"""Events about the decisions of a review: a move, and each new reason to stay once."""

from dataclasses import replace
from decimal import Decimal

import pytest

from broker.quote.spot.review import Move, Stay
from broker.quote.spot.review_report import review_event
from tests.support import build
from tests.support.machines import WORK

JOB = build.active_job(workload=WORK)
SPOT = build.attempt(stays="stays on demand: a move costs $3.10")
ATTEMPT = replace(SPOT, line=replace(SPOT.line, offer=replace(SPOT.line.offer, spot=False)))


def test_a_move_names_the_offer_and_the_saving() -> None:
    offer = build.offer(spot=True)
    move = Move(offer=offer, saved_usd=Decimal("1.5"), message="moves to spot in SE, saves $1.50")
    event = review_event(JOB, ATTEMPT, move)
    assert event is not None
    assert (event.kind, event.attempt_id) == ("attempt.moves", ATTEMPT.id)
    assert event.message == f"attempt {ATTEMPT.number} moves to spot in SE, saves $1.50"
    assert event.data == {"offer": offer.id, "saved_usd": "1.5"}


@pytest.mark.parametrize(
    ("reason", "is_new"),
    [
        ("stays on demand: a move costs $3.10", False),
        ("stays on demand: a move costs $4.20", False),
        ("stays on demand: no spot offer is on sale", True),
    ],
)
def test_a_reason_to_stay_is_reported_if_more_than_numbers_changed(reason: str, is_new: bool) -> None:
    event = review_event(JOB, ATTEMPT, Stay(reason=reason))
    assert (event is not None) == is_new
    if event is not None:
        assert (event.kind, event.message) == ("attempt.stays", f"attempt {ATTEMPT.number} {reason}")


def test_a_script_of_unknown_duration_reports_no_reason_to_stay() -> None:
    script = replace(JOB, workload=replace(WORK, shape=None))
    assert review_event(script, ATTEMPT, Stay(reason="stays on demand: its duration is unknown")) is None


def test_that_spot_stays_on_spot_is_no_news() -> None:
    assert SPOT.line.offer.spot
    assert review_event(JOB, SPOT, Stay(reason="stays on spot: no cheaper spot offer is on sale")) is None
