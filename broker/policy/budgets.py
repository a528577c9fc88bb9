"""Whether policies let a job start, and what their thresholds call for. The store asks under the policies' row locks,
placement to say why a job waits, the dry run over the past: all ask here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from enum import StrEnum

from broker.domain.job import Attempt, AttemptState, Job
from broker.domain.money import ZERO, show
from broker.domain.offer import QuoteLine
from broker.domain.policy import Action, Budget, Policy, Threshold
from broker.policy.windows import window_end

_LEAVING = frozenset({AttemptState.DRAINING, AttemptState.TERMINATING, AttemptState.ENDED})


@dataclass(frozen=True, kw_only=True)
class BudgetRequest:
    """What a launch wants, or the higher cap of a job that runs (no GPUs, no job)."""

    reserve_usd: Decimal
    cap_usd: Decimal
    """Of the job, for the question of approval."""
    approved_usd: Decimal | None = None
    """The highest cap that somebody has approved."""
    gpus: int = 0
    jobs: int = 0


def entry(cap_usd: Decimal, approved_usd: Decimal | None) -> BudgetRequest:
    """What is known of a launch before an offer is chosen: what it reserves depends on that."""
    return BudgetRequest(reserve_usd=ZERO, cap_usd=cap_usd, approved_usd=approved_usd, jobs=1)


def purchase(line: QuoteLine, reserve_usd: Decimal, cap_usd: Decimal, approved_usd: Decimal | None) -> BudgetRequest:
    """What buying a line wants."""
    gpus = line.offer.gpus * line.nodes
    return BudgetRequest(reserve_usd=reserve_usd, cap_usd=cap_usd, approved_usd=approved_usd, gpus=gpus, jobs=1)


def admission(attempt: Attempt, cap_usd: Decimal, approved_usd: Decimal | None) -> BudgetRequest:
    """What a new attempt wants; the cap and its approval are the job's, as they are now."""
    return purchase(attempt.line, attempt.reserved_usd, cap_usd, approved_usd)


def extension(job: Job, attempt: Attempt | None, cap_usd: Decimal) -> BudgetRequest | None:
    """What a higher cap wants for the attempt that runs, which has reserved all that was left under the old one.

    None: nothing is reserved now. It is on its way out, and the next attempt reserves anew; or its time limits it.
    """
    if attempt is None or attempt.state in _LEAVING or attempt.signal is not None or job.spec.max_duration is not None:
        return None
    left = cap_usd - (job.spent_usd - attempt.charged_usd)
    more = max(ZERO, left - attempt.reserved_usd)
    return BudgetRequest(reserve_usd=more, cap_usd=cap_usd, approved_usd=job.approved_usd)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What the jobs that a policy covers have spent and hold."""

    charged: tuple[Decimal, ...] = ()
    """In the windows of the policy's budgets, in their order."""
    outstanding_usd: Decimal = ZERO
    """Reserved by live attempts and not yet charged."""
    gpus: int = 0
    jobs: int = 0

    def plus(self, ask: BudgetRequest) -> "Standing":
        """After the ask was granted."""
        return replace(
            self,
            outstanding_usd=self.outstanding_usd + ask.reserve_usd,
            gpus=self.gpus + ask.gpus,
            jobs=self.jobs + ask.jobs,
        )


@dataclass(frozen=True, kw_only=True)
class Applied:
    """A policy with its standing at a moment."""

    id: int
    policy: Policy
    standing: Standing

    def granted(self, ask: BudgetRequest) -> "Applied":
        return replace(self, standing=self.standing.plus(ask))


class Hold(StrEnum):
    """What a policy does to a job that may not start."""

    APPROVAL = "approval"
    """Somebody with the scope `manage` is asked."""
    WAIT = "wait"
    """It waits in the queue."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a job may not start."""

    hold: Hold
    policy: str
    """Its name."""
    reason: str
    """One line for people. Of a policy that covers more than one team it tells no amount that is another's."""


@dataclass(frozen=True, kw_only=True)
class Reached:
    """A threshold whose share of the limit is spent."""

    budget: Budget
    threshold: Threshold
    charged_usd: Decimal


def judge(ask: BudgetRequest, applied: Sequence[Applied], now: datetime) -> Refusal | None:
    """None: every policy agrees. Approval is asked for first, since people take time."""
    approved = ask.approved_usd is not None and ask.approved_usd >= ask.cap_usd
    if not approved:
        for one in applied:
            if (why := _wants_approval(ask, one)) is not None:
                return Refusal(hold=Hold.APPROVAL, policy=one.policy.name, reason=f"waits for approval: {why}")
    for one in applied:
        if (why := _no_room(ask, one, now)) is not None:
            return Refusal(hold=Hold.WAIT, policy=one.policy.name, reason=why)
    return None


def gpu_room(applied: Sequence[Applied]) -> tuple[int, str] | None:
    """GPUs that one more attempt may have at the most, and whose limit that is, for people; None: any number."""
    left = [(most - one.standing.gpus, one.policy) for one in applied if (most := one.policy.max_gpus) is not None]
    if not left:
        return None
    room, policy = min(left, key=lambda found: found[0])
    room = max(0, room)  # more may be held than a limit that was lowered allows; what has no GPU may start all the same
    held = _own(policy, f", of which {room} are free")
    return room, f"max_gpus of policy {policy.name} is {policy.max_gpus}{held}"


def reached(policy: Policy, standing: Standing) -> Iterator[Reached]:
    """Every threshold whose share is spent. Reservations do not count here: they may come back."""
    for budget, charged in zip(policy.budgets, standing.charged, strict=True):
        for threshold in budget.thresholds:
            if charged >= threshold.at * budget.limit_usd:
                yield Reached(budget=budget, threshold=threshold, charged_usd=charged)


def drains(policy: Policy, standing: Standing) -> Reached | None:
    """The threshold for which what runs has to stop now."""
    return next((one for one in reached(policy, standing) if one.threshold.action is Action.DRAIN), None)


_FOLLOWS = {
    Action.NOTIFY: "",
    Action.REQUIRE_APPROVAL: "; from now on a launch needs approval",
    Action.STOP_LAUNCHES: "; nothing more is launched",
    Action.DRAIN: "; nothing more is launched, and what runs saves a checkpoint and stops",
}


def told_reached(policy: Policy, found: Reached, now: datetime) -> str:
    """One line for those whose policy it is."""
    budget, follows = found.budget, _FOLLOWS[found.threshold.action]
    end = window_end(budget, policy.zone, now) if follows else None
    until = f" until {end.astimezone(policy.zone):%Y-%m-%d %H:%M} {policy.timezone}" if end else ""
    return (
        f"policy {policy.name} ({policy.scope}): {show(found.charged_usd)} of {show(budget.limit_usd)} {_per(budget)} "
        f"is spent, {found.threshold.at:.0%} is reached{follows}{until}"
    )


def _wants_approval(ask: BudgetRequest, one: Applied) -> str | None:
    above = one.policy.approval_above_usd
    if above is not None and ask.cap_usd > above:
        return f"policy {one.policy.name} asks for it above a cap of {show(above)}"
    for found in reached(one.policy, one.standing):
        if found.threshold.action is Action.REQUIRE_APPROVAL:
            return f"policy {one.policy.name} asks for it once {_share(one.policy, found)}"
    return None


def _no_room(ask: BudgetRequest, one: Applied, now: datetime) -> str | None:
    policy, standing = one.policy, one.standing
    lead = f"waits for policy {policy.name}"
    for found in reached(policy, standing):
        stops = found.threshold.action is Action.STOP_LAUNCHES and ask.jobs
        if stops or found.threshold.action is Action.DRAIN:
            return f"{lead}: nothing is launched once {_share(policy, found)}{_until(policy, found.budget, now)}"
    if ask.jobs and policy.max_jobs is not None and standing.jobs + ask.jobs > policy.max_jobs:
        return f"{lead}: max_jobs is {policy.max_jobs}{_own(policy, f', {standing.jobs} hold machines')}"
    if ask.gpus and policy.max_gpus is not None and standing.gpus + ask.gpus > policy.max_gpus:
        held = _own(policy, f", {standing.gpus} are held")
        return f"{lead}: max_gpus is {policy.max_gpus}{held}, and it needs {ask.gpus}"
    for budget, charged in zip(policy.budgets, standing.charged, strict=True):
        if charged + standing.outstanding_usd + ask.reserve_usd > budget.limit_usd:
            return f"{lead}: {_too_much(ask, policy, budget, charged, standing.outstanding_usd, now)}"
    return None


def _too_much(
    ask: BudgetRequest, policy: Policy, budget: Budget, charged: Decimal, outstanding: Decimal, now: datetime
) -> str:
    limit = f"{show(budget.limit_usd)} {_per(budget)}"
    if ask.reserve_usd > budget.limit_usd:
        return f"it reserves {show(ask.reserve_usd)}, more than the budget of {limit}; lower its cap or raise the limit"
    if not ask.reserve_usd:
        return f"the budget of {limit} is used up" + _until(policy, budget, now)
    taken = _own(policy, f" has {show(charged)} spent and {show(outstanding)} reserved, and")
    return f"the budget of {limit}{taken} leaves less than the {show(ask.reserve_usd)} it reserves" + _until(
        policy, budget, now
    )


def _share(policy: Policy, found: Reached) -> str:
    share = f"{found.threshold.at:.0%} of {show(found.budget.limit_usd)} {_per(found.budget)} is spent"
    return share + _own(policy, f" ({show(found.charged_usd)} is)")


def _until(policy: Policy, budget: Budget, now: datetime) -> str:
    end = window_end(budget, policy.zone, now)
    if end is None:
        return ""
    return f"; the next {budget.per} begins {end.astimezone(policy.zone):%Y-%m-%d %H:%M} {policy.timezone}"


def _per(budget: Budget) -> str:
    """`a day`, `a rolling week`."""
    return f"a rolling {budget.per}" if budget.window == "rolling" else f"a {budget.per}"


def _own(policy: Policy, amounts: str) -> str:
    """What others have spent is nothing for a job's owner to know."""
    return amounts if policy.team is not None else ""
