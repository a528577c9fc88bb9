"""People of a Slack workspace, and as whom they act here."""

from dataclasses import dataclass
from datetime import datetime

from broker.domain.tenancy import Scope


@dataclass(frozen=True, kw_only=True)
class SlackUser:
    """A link: whoever is `user` in `workspace` acts as `owner` of `team`, with these scopes and no token."""

    team: str
    workspace: str
    """`T…`, as Slack names it."""
    user: str
    """`U…`, as Slack names it."""
    owner: str
    scopes: tuple[Scope, ...]
    name: str = ""
    """As Slack showed it when the link was made; for people."""
    linked_by: str = ""
    linked_at: datetime | None = None
    """The database's time."""
