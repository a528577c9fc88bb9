"""The daemon's own delays are part of the lead before a cap; docs/design/money.md has the same formula."""

from broker.billing.drain import DrainBudget
from broker.controllers.base.context import Intervals


def test_every_round_and_listing_between_the_line_and_the_proof_is_counted() -> None:
    intervals = Intervals(poll_s=5, look_s=5, list_s=7, billing_s=15)
    assert intervals.drain_budget(60) == DrainBudget(detect_s=15 + 6, drain_s=60, teardown_proof_s=4 * 6 + 2 * 7)
    assert intervals.drain_budget(60).lead_s == 21 + 60 + 38


def test_a_broker_that_polls_often_has_short_rounds() -> None:
    assert Intervals(poll_s=0.5, look_s=0.25, list_s=1, billing_s=4).drain_budget(30).teardown_proof_s == 4 * 0.75 + 2
