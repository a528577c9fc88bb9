"""Decides whether policies let a job start, and which thresholds are reached.

Used by the store under the policies' row locks, by placement to explain a wait, and by the dry run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from enum import StrEnum

from broker.domain.job import Attempt, AttemptState, Job
from broker.domain.money import ZERO, format_usd
from broker.domain.offer import QuoteLine
from broker.domain.policy import Action, Budget, Policy, Threshold
from broker.policy.windows import window_end

_LEAVING = frozenset({AttemptState.DRAINING, AttemptState.TERMINATING, AttemptState.ENDED})


@dataclass(frozen=True, kw_only=True)
class BudgetRequest:
    """Resources that a launch requests, or the dollars of a running job's higher cap (`gpus` and `jobs` are 0)."""

    reserve_usd: Decimal
    cap_usd: Decimal
    """The job's cap, for the approval rule."""
    approved_usd: Decimal | None = None
    """The highest cap that was approved; None: no cap was approved."""
    gpus: int = 0
    jobs: int = 0


def entry(cap_usd: Decimal, approved_usd: Decimal | None) -> BudgetRequest:
    """Return the request of a launch without a chosen offer; it reserves nothing, because the offer sets the amount."""
    return BudgetRequest(reserve_usd=ZERO, cap_usd=cap_usd, approved_usd=approved_usd, jobs=1)


def purchase(line: QuoteLine, reserve_usd: Decimal, cap_usd: Decimal, approved_usd: Decimal | None) -> BudgetRequest:
    """Return the request of buying a line."""
    gpus = line.offer.gpus * line.nodes
    return BudgetRequest(reserve_usd=reserve_usd, cap_usd=cap_usd, approved_usd=approved_usd, gpus=gpus, jobs=1)


def admission(attempt: Attempt, cap_usd: Decimal, approved_usd: Decimal | None) -> BudgetRequest:
    """Return the request of a new attempt; the cap and its approval are the job's current values."""
    return purchase(attempt.line, attempt.reserved_usd, cap_usd, approved_usd)


def extension(job: Job, attempt: Attempt | None, cap_usd: Decimal) -> BudgetRequest | None:
    """Return the request of a higher cap for the running attempt, which has reserved everything under the old cap.

    None: nothing is reserved now. Either the attempt is ending and the next one makes its own reservation, or
    `max_duration` limits the attempt.
    """
    if attempt is None or attempt.state in _LEAVING or attempt.signal is not None or job.spec.max_duration is not None:
        return None
    left = cap_usd - (job.spent_usd - attempt.charged_usd)
    more = max(ZERO, left - attempt.reserved_usd)
    return BudgetRequest(reserve_usd=more, cap_usd=cap_usd, approved_usd=job.approved_usd)


@dataclass(frozen=True, kw_only=True)
class PolicyUsage:
    """Spending and machines of the jobs that a policy covers."""

    charged: tuple[Decimal, ...] = ()
    """Dollars charged in the windows of the policy's budgets, in their order."""
    outstanding_usd: Decimal = ZERO
    """Dollars reserved by live attempts and not yet charged."""
    gpus: int = 0
    jobs: int = 0

    def plus(self, ask: BudgetRequest) -> "PolicyUsage":
        """Return the status after the request was granted."""
        return replace(
            self,
            outstanding_usd=self.outstanding_usd + ask.reserve_usd,
            gpus=self.gpus + ask.gpus,
            jobs=self.jobs + ask.jobs,
        )


@dataclass(frozen=True, kw_only=True)
class Applied:
    """A policy with its status at a moment."""

    id: int
    policy: Policy
    usage: PolicyUsage

    def granted(self, ask: BudgetRequest) -> "Applied":
        return replace(self, usage=self.usage.plus(ask))


class Hold(StrEnum):
    """Effect of a policy on a job that may not start."""

    APPROVAL = "approval"
    """A user with the scope `manage` must approve the job."""
    WAIT = "wait"
    """The job waits in the queue."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Reason why a job may not start."""

    hold: Hold
    policy: str
    """Name of the policy."""
    reason: str
    """One line for users. For a policy that covers several teams, the line states no amounts, because the amounts
    belong to other teams.
    """


@dataclass(frozen=True, kw_only=True)
class Reached:
    """A threshold whose share of the limit is spent."""

    budget: Budget
    threshold: Threshold
    charged_usd: Decimal


def judge(ask: BudgetRequest, applied: Sequence[Applied], now: datetime) -> Refusal | None:
    """Return why the job may not start; None: every policy allows it.

    Approval is checked before limits, because a user's answer takes time.
    """
    approved = ask.approved_usd is not None and ask.approved_usd >= ask.cap_usd
    if not approved:
        for applied_policy in applied:
            if (why := _approval_message(ask, applied_policy)) is not None:
                return Refusal(
                    hold=Hold.APPROVAL, policy=applied_policy.policy.name, reason=f"waits for approval: {why}"
                )
    for applied_policy in applied:
        if (why := _limit_message(ask, applied_policy, now)) is not None:
            return Refusal(hold=Hold.WAIT, policy=applied_policy.policy.name, reason=why)
    return None


def free_gpus(applied: Sequence[Applied]) -> tuple[int, str] | None:
    """Return how many GPUs a new attempt may have, and the limit in words; None: any number."""
    left = [
        (limit - applied_policy.usage.gpus, applied_policy.policy)
        for applied_policy in applied
        if (limit := applied_policy.policy.max_gpus) is not None
    ]
    if not left:
        return None
    free, policy = min(left, key=lambda limit: limit[0])
    free = max(0, free)  # a lowered limit may be exceeded already; attempts without a GPU may still start
    held_note = _team_only(policy, f", of which {free} are free")
    return free, f"max_gpus of policy {policy.name} is {policy.max_gpus}{held_note}"


def reached(policy: Policy, usage: PolicyUsage) -> Iterator[Reached]:
    """Yield thresholds whose share is spent. Reservations do not count, because they may be released."""
    for budget, charged in zip(policy.budgets, usage.charged, strict=True):
        for threshold in budget.thresholds:
            if charged >= threshold.at * budget.limit_usd:
                yield Reached(budget=budget, threshold=threshold, charged_usd=charged)


def drains(policy: Policy, usage: PolicyUsage) -> Reached | None:
    """Return the threshold that requires running jobs to stop now; None: none."""
    return next((crossed for crossed in reached(policy, usage) if crossed.threshold.action is Action.DRAIN), None)


_EFFECTS = {
    Action.NOTIFY: "",
    Action.REQUIRE_APPROVAL: "; from now on a launch needs approval",
    Action.STOP_LAUNCHES: "; nothing more is launched",
    Action.DRAIN: "; nothing more is launched, and what runs saves a checkpoint and stops",
}


def reached_message(policy: Policy, crossed: Reached, now: datetime) -> str:
    """Return one line for the owners of the policy."""
    budget, follows = crossed.budget, _EFFECTS[crossed.threshold.action]
    end = window_end(budget, policy.zone, now) if follows else None
    until = f" until {end.astimezone(policy.zone):%Y-%m-%d %H:%M} {policy.timezone}" if end else ""
    return (
        f"policy {policy.name} ({policy.scope}): {format_usd(crossed.charged_usd)} of {format_usd(budget.limit_usd)} "
        f"{_per(budget)} is spent, {crossed.threshold.at:.0%} is reached{follows}{until}"
    )


def _approval_message(ask: BudgetRequest, applied_policy: Applied) -> str | None:
    above = applied_policy.policy.approval_above_usd
    if above is not None and ask.cap_usd > above:
        return f"policy {applied_policy.policy.name} requires it above a cap of {format_usd(above)}"
    for crossed in reached(applied_policy.policy, applied_policy.usage):
        if crossed.threshold.action is Action.REQUIRE_APPROVAL:
            return f"policy {applied_policy.policy.name} requires it once {_share(applied_policy.policy, crossed)}"
    return None


def _limit_message(ask: BudgetRequest, applied_policy: Applied, now: datetime) -> str | None:
    policy, usage = applied_policy.policy, applied_policy.usage
    lead = f"waits for policy {policy.name}"
    for crossed in reached(policy, usage):
        stops = crossed.threshold.action is Action.STOP_LAUNCHES and ask.jobs
        if stops or crossed.threshold.action is Action.DRAIN:
            return (
                f"{lead}: nothing is launched once {_share(policy, crossed)}{_resets_text(policy, crossed.budget, now)}"
            )
    if ask.jobs and policy.max_jobs is not None and usage.jobs + ask.jobs > policy.max_jobs:
        return f"{lead}: max_jobs is {policy.max_jobs}{_team_only(policy, f', {usage.jobs} hold machines')}"
    if ask.gpus and policy.max_gpus is not None and usage.gpus + ask.gpus > policy.max_gpus:
        held_note = _team_only(policy, f", {usage.gpus} are held")
        return f"{lead}: max_gpus is {policy.max_gpus}{held_note}, and it needs {ask.gpus}"
    for budget, charged in zip(policy.budgets, usage.charged, strict=True):
        if charged + usage.outstanding_usd + ask.reserve_usd > budget.limit_usd:
            return f"{lead}: {_over_budget_message(ask, policy, budget, charged, usage.outstanding_usd, now)}"
    return None


def _over_budget_message(
    ask: BudgetRequest, policy: Policy, budget: Budget, charged: Decimal, outstanding: Decimal, now: datetime
) -> str:
    limit = f"{format_usd(budget.limit_usd)} {_per(budget)}"
    if ask.reserve_usd > budget.limit_usd:
        reserve = format_usd(ask.reserve_usd)
        return f"it reserves {reserve}, more than the budget of {limit}; lower its cap or raise the limit"
    if not ask.reserve_usd:
        return f"the budget of {limit} is used up" + _resets_text(policy, budget, now)
    spent_note = _team_only(policy, f" has {format_usd(charged)} spent and {format_usd(outstanding)} reserved, and")
    return (
        f"the budget of {limit}{spent_note} leaves less than the {format_usd(ask.reserve_usd)} it reserves"
        + _resets_text(policy, budget, now)
    )


def _share(policy: Policy, crossed: Reached) -> str:
    share = f"{crossed.threshold.at:.0%} of {format_usd(crossed.budget.limit_usd)} {_per(crossed.budget)} is spent"
    return share + _team_only(policy, f" ({format_usd(crossed.charged_usd)} is)")


def _resets_text(policy: Policy, budget: Budget, now: datetime) -> str:
    end = window_end(budget, policy.zone, now)
    if end is None:
        return ""
    return f"; the next {budget.per} begins {end.astimezone(policy.zone):%Y-%m-%d %H:%M} {policy.timezone}"


def _per(budget: Budget) -> str:
    """Return `a day` or `a rolling week`."""
    return f"a rolling {budget.per}" if budget.window == "rolling" else f"a {budget.per}"


def _team_only(policy: Policy, amounts: str) -> str:
    """Return the amounts, or an empty text if they include other teams' spending."""
    return amounts if policy.team is not None else ""
