"""Decides what the budgets controller reports and which running attempts it drains, and words both.

The thresholds themselves are judged in `broker.policy.budgets`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from broker.domain.job import Attempt, Event, Job
from broker.domain.notifications import Notice
from broker.domain.policy import Policy
from broker.policy.budgets import Applied, Reached, drains, reached, reached_message
from broker.policy.windows import window_start


@dataclass(frozen=True, kw_only=True)
class ThresholdReport:
    """A notice about a reached threshold. The store posts it once in the window that began at `since`."""

    policy_id: int
    reached: Reached
    notice: Notice
    since: datetime


@dataclass(frozen=True, kw_only=True)
class BudgetDecision:
    """Notices to post, and policies whose running jobs drain."""

    reports: tuple[ThresholdReport, ...]
    draining: tuple[Policy, ...]


def decide_budgets(applied: Sequence[Applied], now: datetime) -> BudgetDecision:
    """Return what follows from the spending of all policies at `now`."""
    return BudgetDecision(
        reports=tuple(
            _report(entry, threshold, now) for entry in applied for threshold in reached(entry.policy, entry.usage)
        ),
        draining=tuple(entry.policy for entry in applied if drains(entry.policy, entry.usage) is not None),
    )


def budget_drain_event(job: Job, attempt: Attempt, draining: Sequence[Policy]) -> Event | None:
    """Return the event of an attempt that a policy drains now; None: no policy does, or the attempt has a signal."""
    if attempt.signal is not None:
        return None
    policy = next((policy for policy in draining if policy.covers(job.team, job.owner)), None)
    if policy is None:
        return None
    return Event(
        job_id=job.id,
        attempt_id=attempt.id,
        kind="job.budget_drain",
        message=f"policy {policy.name} drains: checkpoint and stop; the job continues when the budget allows it",
        data={"policy": policy.name},
    )


def _report(applied: Applied, crossed: Reached, now: datetime) -> ThresholdReport:
    budget, threshold, policy = crossed.budget, crossed.threshold, applied.policy
    notice_id = f"budget-{applied.id}-{budget.key}-{threshold.at}-{threshold.action}-{int(now.timestamp())}"
    notice = Notice(
        id=notice_id.replace(".", "_").replace("/", "-"),
        kind="budget.threshold",
        team=policy.team,
        message=reached_message(policy, crossed, now),
        data={
            "policy": policy.name,
            "budget": budget.key,
            "at": str(threshold.at),
            "action": threshold.action.value,
            "charged_usd": str(crossed.charged_usd),
            "limit_usd": str(budget.limit_usd),
        },
    )
    since = window_start(budget, policy.zone, now)
    return ThresholdReport(policy_id=applied.id, reached=crossed, notice=notice, since=since)
