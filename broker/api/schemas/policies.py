"""Policies and budgets over the wire."""

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
    """What policies would do to a job if it were submitted now."""

    hold: Hold
    """`approval`: somebody with the scope `manage` is asked; `wait`: it waits in the queue."""
    policy: str
    """Its name."""
    reason: str
    """Why, and until when or what to change, in one line."""


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
    """Null: deleted."""
    at: datetime
    actor: str


class PolicyHistory(Wire):
    items: tuple[PolicyVersionView, ...]
    """Newest first."""


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
    """In the window."""
    committed_usd: Decimal
    """Charged in the window and reserved by live attempts: what never passes the limit."""
    since: datetime
    """The window's start, with the quarter-hour that it falls into."""
    until: datetime | None
    """When the window ends; null: it rolls."""
    thresholds: tuple[ThresholdView, ...]


class StandingView(Wire):
    """A policy with what the jobs that it covers have spent and hold."""

    name: str
    team: str | None
    user: str | None
    timezone: str
    budgets: tuple[BudgetView, ...]
    outstanding_usd: Decimal
    """Reserved by live attempts and not yet charged."""
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
    """A launch that would have waited; `until` null: to the end."""

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
    """A job for which approval would have been asked."""

    job_id: JobId
    at: datetime
    reason: str


class CrossedView(Wire):
    """A threshold that would have been told."""

    budget: str
    share: Annotated[Decimal, Field(gt=0)]
    action: Action
    at: datetime


class DryRunView(Wire):
    """What a policy would have done."""

    since: datetime
    until: datetime
    launches: int
    held: tuple[HeldView, ...]
    drained: tuple[DrainedView, ...]
    asked: tuple[AskedView, ...]
    crossed: tuple[CrossedView, ...]
    usd_spent: Decimal
    """What was paid in that time by those whom the policy covers."""
    usd_not_spent: Decimal
    """Of it, what the policy would have held back to the end."""
