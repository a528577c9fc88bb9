"""Policies and budgets on the wire."""

from datetime import datetime
from decimal import Decimal
from typing import Annotated

from pydantic import Field

from broker.api.schemas.base import Wire
from broker.domain.ids import JobId
from broker.domain.policy import Action, BudgetPeriod, Policy, Window
from broker.domain.spec import Usd
from broker.policy.budgets import Hold
from trainer.contract.base import Config


class HoldView(Wire):
    """Effect of policies on a job if it were submitted now."""

    hold: Hold
    """`approval`: a user with the scope `manage` must approve it; `wait`: it waits in the queue."""
    policy: str
    """Name of the policy."""
    reason: str
    """Reason in one line, with the end of the wait or the fix."""


class PolicyView(Wire):
    version: int
    policy: Policy
    changed_at: datetime
    changed_by: str


class PolicyList(Wire):
    items: tuple[PolicyView, ...]


class PolicyVersionView(Wire):
    version: int
    policy: Policy | None
    """The policy; null: deleted."""
    at: datetime
    actor: str


class PolicyHistory(Wire):
    items: tuple[PolicyVersionView, ...]
    """Versions, newest first."""


class ThresholdView(Wire):
    at: Decimal
    """Share of the limit."""
    action: Action
    reached: bool


class BudgetView(Wire):
    """One budget at this moment."""

    limit_usd: Decimal
    per: BudgetPeriod
    window: Window
    charged_usd: Decimal
    """Dollars charged in the window."""
    committed_usd: Decimal
    """Dollars charged in the window and reserved by live attempts. This sum never exceeds the limit."""
    since: datetime
    """Start of the window, rounded down to a quarter of an hour."""
    until: datetime | None
    """End of the window; null: a rolling window."""
    thresholds: tuple[ThresholdView, ...]


class StandingView(Wire):
    """A policy with the spent and reserved dollars of the jobs that it covers."""

    name: str
    team: str | None
    user: str | None
    timezone: str
    budgets: tuple[BudgetView, ...]
    outstanding_usd: Decimal
    """Dollars reserved by live attempts and not yet charged."""
    gpus: int
    max_gpus: int | None
    jobs: int
    max_jobs: int | None
    approval_above_usd: Decimal | None


class BudgetList(Wire):
    at: datetime
    items: tuple[StandingView, ...]


class Approval(Config):
    up_to_usd: Usd | None = None
    """Approve a cap up to this as well; absent: the job's cap."""


class HeldView(Wire):
    """A launch that would have waited. `until` null: to the end."""

    job_id: JobId
    attempt: int
    at: datetime
    until: datetime | None
    reason: str


class DrainedView(Wire):
    job_id: JobId
    attempt: int
    at: datetime


class AskedView(Wire):
    """A job that would have needed approval."""

    job_id: JobId
    at: datetime
    reason: str


class CrossedView(Wire):
    """A threshold that would have been reported."""

    budget: str
    share: Annotated[Decimal, Field(gt=0)]
    action: Action
    at: datetime


class DryRunView(Wire):
    """Effects that a policy would have had."""

    since: datetime
    until: datetime
    launches: int
    held: tuple[HeldView, ...]
    drained: tuple[DrainedView, ...]
    asked: tuple[AskedView, ...]
    crossed: tuple[CrossedView, ...]
    usd_spent: Decimal
    """Dollars spent in that time by the jobs that the policy covers."""
    usd_not_spent: Decimal
    """Part of `usd_spent` that the policy would have held back to the end."""
