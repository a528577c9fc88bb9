"""Notices about reached thresholds, and attempts that a policy drains."""

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.job import AttemptState, Signal
from broker.policy.budget_reports import budget_drain_event, decide_budgets
from broker.policy.budgets import reached_message
from broker.policy.windows import window_start
from tests.support.build import active_job, attempt
from tests.unit.broker.policy.test_budgets import NOW, applied, budget, policy, thresholds

NOTIFY_THEN_DRAIN = policy(budgets=[budget(thresholds=thresholds(("0.5", "notify"), ("0.9", "drain")))])


@given(charged=st.integers(0, 120))
def test_each_reached_threshold_is_reported_and_the_drain_drains(charged: int) -> None:
    decision = decide_budgets([applied(NOTIFY_THEN_DRAIN, str(charged))], NOW)
    assert [str(report.reached.threshold.at) for report in decision.reports] == [
        at for at in ("0.5", "0.9") if charged >= 100 * Decimal(at)
    ]
    assert decision.draining == ((NOTIFY_THEN_DRAIN,) if charged >= 90 else ())


def test_a_notice_names_its_policy_and_amounts() -> None:
    """The id follows from window and threshold; a notice whose id was posted before is dropped."""
    (report,) = decide_budgets([applied(NOTIFY_THEN_DRAIN, "60")], NOW).reports
    notice = report.notice
    assert (notice.kind, notice.team) == ("budget.threshold", "nlp")
    assert notice.message == reached_message(NOTIFY_THEN_DRAIN, report.reached, NOW)
    assert notice.data == {
        "policy": "nlp", "budget": "day/calendar/100", "at": "0.5", "action": "notify", "charged_usd": "60",
        "limit_usd": "100",
    }  # fmt: skip
    assert notice.id == f"budget-1-day-calendar-100-0_5-notify-{int(NOW.timestamp())}"
    assert (report.policy_id, report.since) == (
        1,
        window_start(NOTIFY_THEN_DRAIN.budgets[0], NOTIFY_THEN_DRAIN.zone, NOW),
    )


def test_every_policy_that_drains_is_named_in_order() -> None:
    other = NOTIFY_THEN_DRAIN.model_copy(update={"name": "b"})
    spent = [applied(NOTIFY_THEN_DRAIN, "10"), applied(other, "95"), applied(policy(max_jobs=1))]
    decision = decide_budgets(spent, NOW)
    assert decision.draining == (other,)


@pytest.mark.parametrize(
    ("team", "signal", "drains"),
    [("nlp", None, True), ("vision", None, False), ("nlp", Signal.CAP, False)],
)
def test_a_drain_covers_the_policys_jobs_without_a_signal(team: str, signal: Any, drains: bool) -> None:
    job, running = active_job(team=team), attempt(AttemptState.TRAINING, signal=signal)
    others = policy(team="vision", name="other", user="zoe", max_jobs=1)
    event = budget_drain_event(job, running, [others, NOTIFY_THEN_DRAIN])
    assert (event is not None) == drains
    if event is not None:
        assert (event.kind, event.attempt_id, event.data) == ("job.budget_drain", running.id, {"policy": "nlp"})
        assert event.message.startswith("policy nlp drains: checkpoint and stop")
