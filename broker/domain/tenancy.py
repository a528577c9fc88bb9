"""Teams and whoever asks for them. A team sees its own; its members share jobs, budgets and channels."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal

DEFAULT_TEAM = "default"
"""Of an installation that never made another."""

Scope = Literal["read", "submit", "manage", "metrics", "admin"]
"""read: look; submit: start, stop and pay for jobs; manage: the own team's tokens, policies, approvals and channels;
metrics: totals of the whole installation, and nothing else; admin: everything of every team."""
OPERATOR_SCOPES = frozenset({"metrics", "admin"})
"""They reach beyond the own team, so operators alone give them."""


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """As whom the store is asked."""

    team: str
    owner: str
    """The person, or the program, of that team: who is written into the audit."""
    token_id: str = ""
    operator: bool = False
    """Sees every team."""

    def did(
        self,
        action: str,
        target: str,
        *,
        team: str | None = None,
        before: Mapping[str, Any] | None = None,
        after: Mapping[str, Any] | None = None,
        usd: Decimal | None = None,
    ) -> "AuditEntry":
        """The entry of a write by this tenant. `team`: of what was written, where it is not the own one."""
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
    """One write by a person or program: who, what, before, after and what it may cost. Never deleted."""

    team: str
    actor: str
    token_id: str
    action: str
    """Dotted, e.g. `job.submit`."""
    target: str
    """Id or name of what was written."""
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    usd: Decimal | None = None
    """The most that this write allows to be spent, where it does."""
    id: str = ""
    """Random, given by the store."""
    at: datetime | None = None
    """The database's time."""


def withheld(own: Collection[str], wanted: Sequence[str]) -> list[str]:
    """The scopes of `wanted` that a caller with the scopes `own` may neither give nor take away, in their order.

    An operator may all; all others no more than they have themselves, and nothing that reaches beyond their team.
    """
    if "admin" in own:
        return []
    return [scope for scope in wanted if scope not in own or scope in OPERATOR_SCOPES]


def over_since(ends: Sequence[datetime | None], now: datetime) -> datetime | None:
    """When the last of somebody's tokens ended (`ends`; None: never does); None: one lasts, or there never was any."""
    times = [end for end in ends if end is not None]
    if not times or len(times) < len(ends):
        return None
    return max(times) if max(times) <= now else None


def stays(team: str) -> bool:
    """True for the team that an installation cannot be without: it has the operator's own token."""
    return team == DEFAULT_TEAM
