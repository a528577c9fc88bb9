"""Teams and the audit over the wire."""

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any

from pydantic import Field

from broker.api.wire import Wire
from broker.domain.spec import Name
from trainer.contract.base import Config, Text


class TeamRequest(Config):
    name: Name
    note: Annotated[Text, Field(max_length=200)] = ""


class TeamView(Wire):
    name: str
    created_at: datetime
    note: str


class TeamList(Wire):
    items: tuple[TeamView, ...]


class AuditView(Wire):
    """One write: who, what, before and after."""

    id: str
    at: datetime
    team: str
    """Of what was written; empty: the installation's."""
    actor: str
    token_id: str
    """Empty: the daemon itself."""
    action: str
    target: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    usd: Decimal | None
    """The most that this write allows to be spent, where it does."""


class AuditPage(Wire):
    items: tuple[AuditView, ...]
    next: str | None
    """Give it as `cursor` for the next page; null on the last one."""
