"""Policies: spending limits of a team, a user or the whole installation, written as YAML or JSON."""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from pydantic import Field, field_validator, model_validator

from broker.domain.spec import IdlePolicy, Name, Usd
from trainer.contract.base import Config, Text
from trainer.contract.suggestions import close_matches


class BudgetPeriod(StrEnum):
    DAY = "day"
    WEEK = "week"
    MONTH = "month"


class Window(StrEnum):
    CALENDAR = "calendar"
    """The current day, week (from Monday) or month, in the policy's timezone."""
    ROLLING = "rolling"
    """The last 24 hours, 7 days or 30 days."""


class Action(StrEnum):
    NOTIFY = "notify"
    REQUIRE_APPROVAL = "require_approval"
    STOP_LAUNCHES = "stop_launches"
    DRAIN = "drain"
    """Running jobs save a checkpoint and stop; they resume when the budget allows. Implies stop_launches."""


class Threshold(Config):
    """Action to take once a share of the limit is spent."""

    at: Annotated[Decimal, Field(gt=0, le=1, max_digits=5, decimal_places=4)]
    """Share of the limit: 0.8 is 80 %."""
    action: Action


class Budget(Config):
    """Dollar limit in a window of time: charges and reservations together never exceed it."""

    limit_usd: Usd
    per: BudgetPeriod
    window: Window = Window.CALENDAR
    thresholds: Annotated[tuple[Threshold, ...], Field(max_length=16)] = ()

    @property
    def key(self) -> str:
        """Key of the budget within its policy.

        A changed limit is another budget, whose thresholds are reported again.
        """
        return f"{self.per}/{self.window}/{self.limit_usd.normalize():f}"

    @model_validator(mode="after")
    def _once(self) -> Self:
        pairs = [(threshold.at, threshold.action) for threshold in self.thresholds]
        for at, action in pairs:
            if pairs.count((at, action)) > 1:
                raise ValueError(f"{action} at {at} is given twice; keep one")
        return self


class Policy(Config):
    """Limits of a team, of one user, or, without either, of the whole installation."""

    name: Name
    team: Name | None = None
    """Applies to this team's jobs; absent: to every team's."""
    user: Name | None = None
    """Applies to this user's jobs; absent: to every user's."""
    timezone: Annotated[Text, Field(max_length=64)] = "UTC"
    """IANA name, e.g. `Europe/Berlin`: calendar days, weeks and months begin in this timezone."""
    budgets: Annotated[tuple[Budget, ...], Field(max_length=16)] = ()
    max_gpus: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Maximum number of GPUs of machines that are bought and not yet gone, at any moment."""
    max_jobs: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Maximum number of jobs that hold machines at any moment."""
    approval_above_usd: Annotated[Decimal, Field(ge=0, le=1_000_000, max_digits=13, decimal_places=6)] | None = None
    """A job with a higher cap starts once a user with the scope `manage` has approved it."""
    idle: IdlePolicy | None = None
    """Conditions under which a machine counts as idle, and the action to take, for jobs without a setting of their
    own.
    """

    @field_validator("timezone")
    @classmethod
    def _known_zone(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            nearest = close_matches(name, sorted(available_timezones()), n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "take one such as Europe/Berlin or UTC"
            raise ValueError(f"no IANA timezone {name!r}; {hint}") from None
        return name

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        rules = (self.max_gpus, self.max_jobs, self.approval_above_usd, self.idle)
        if not self.budgets and all(rule is None for rule in rules):
            raise ValueError("has no rule; give budgets, max_gpus, max_jobs, approval_above_usd or idle")
        keys = [(budget.per, budget.window) for budget in self.budgets]
        for per, window in keys:
            if keys.count((per, window)) > 1:
                raise ValueError(f"two {window} budgets per {per}; keep one")
        return self

    @property
    def zone(self) -> ZoneInfo:
        return ZoneInfo(self.timezone)

    @property
    def scope(self) -> str:
        """Description of the jobs that it applies to."""
        owner = " of ".join(filter(None, (self.user and f"user {self.user}", self.team and f"team {self.team}")))
        return owner or "installation"

    def covers(self, team: str, owner: str) -> bool:
        """Return True for jobs of `owner` in `team`."""
        return self.team in (None, team) and self.user in (None, owner)


@dataclass(frozen=True, kw_only=True)
class StoredPolicy:
    """A policy as the store keeps it."""

    id: int
    """Rows are locked in the order of their ids."""
    version: int
    policy: Policy
    changed_at: datetime
    changed_by: str


@dataclass(frozen=True, kw_only=True)
class PolicyVersion:
    """One entry of a policy's history; `policy` is None where it was deleted."""

    version: int
    policy: Policy | None
    at: datetime
    actor: str
