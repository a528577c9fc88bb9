"""Teams and callers. A team sees its own rows; its members share jobs, budgets and channels."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal

DEFAULT_TEAM = "default"
"""Team of an installation that has created no other."""

Scope = Literal["read", "submit", "manage", "metrics", "admin"]
"""Rights of a token. `read`: view; `submit`: start, stop and pay for jobs; `manage`: the team's tokens, policies,
approvals and channels; `metrics`: only totals of the whole installation; `admin`: everything of every team.
"""
OPERATOR_SCOPES = frozenset({"metrics", "admin"})
"""Scopes that reach across teams, so that only operators grant them."""


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """Identity of a caller of the store."""

    team: str
    owner: str
    """The user or program of that team, which the audit log records."""
    token_id: str = ""
    operator: bool = False
    """True: the caller sees every team."""

    def audit_entry(
        self,
        action: str,
        target: str,
        *,
        team: str | None = None,
        before: Mapping[str, Any] | None = None,
        after: Mapping[str, Any] | None = None,
        usd: Decimal | None = None,
    ) -> "AuditEntry":
        """Return the audit entry of a write by this caller.

        `team`: the team of the written row, if it is not the caller's.
        """
        return AuditEntry(
            team=self.team if team is None else team,
            actor=self.owner,
            token_id=self.token_id,
            action=action,
            target=target,
            before=before,
            after=after,
            usd=usd,
        )


OPERATOR = Tenant(team="", owner="gpubroker", operator=True)
"""The daemon itself."""


@dataclass(frozen=True, kw_only=True)
class Team:
    name: str
    created_at: datetime
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class AuditEntry:
    """One write by a user or program: actor, action, state before and after, and possible cost. Never deleted."""

    team: str
    actor: str
    token_id: str
    action: str
    """Dotted, e.g. `job.submit`."""
    target: str
    """Id or name of the written row."""
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    usd: Decimal | None = None
    """Maximum dollars that this write allows to be spent; None: it allows no spending."""
    id: str = ""
    """Random id, assigned by the store."""
    at: datetime | None = None
    """The database's time; None: not stored yet."""


def ungrantable_scopes(own: Collection[str], requested: Sequence[str]) -> list[str]:
    """Return the `requested` scopes that a caller with the scopes `own` may neither grant nor revoke, in their order.

    An operator may grant all. Other callers may grant only scopes they have, and none that reaches across teams.
    """
    if "admin" in own:
        return []
    return [scope for scope in requested if scope not in own or scope in OPERATOR_SCOPES]


def last_expiry(ends: Sequence[datetime | None], now: datetime) -> datetime | None:
    """Return the time at which the last token ended; None: a token is valid, or there are none.

    `ends`: expiry of each token; None: it never expires.
    """
    times = [end for end in ends if end is not None]
    if not times or len(times) < len(ends):
        return None
    return max(times) if max(times) <= now else None


def is_permanent_team(team: str) -> bool:
    """Return True for the team that cannot be deleted: it has the operator's own token."""
    return team == DEFAULT_TEAM
