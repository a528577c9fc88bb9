"""Who may give whom which rights."""

from collections.abc import Collection, Sequence
from datetime import datetime

from broker.domain.tenancy import DEFAULT_TEAM, OPERATOR_SCOPES


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
