"""Teams, tokens and the audit over the wire."""

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any

from pydantic import Field

from broker.api.schemas.base import Wire
from broker.domain.spec import EnvName, Moment, Name
from broker.domain.tenancy import Scope
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


class TokenRequest(Config):
    owner: Name
    """As whom it acts: whose secrets and uploads it uses."""
    team: Name | None = None
    """Whose jobs it sees; yours when absent. Another one: operators only."""
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1, max_length=5)] = ("read", "submit")
    """read, submit, manage (the team's tokens, policies and channels), metrics, admin (every team)."""
    expires_at: Moment | None = None
    """Refused from then on; never, when absent."""
    note: Annotated[Text, Field(max_length=200)] = ""


class TokenView(Wire):
    id: str
    team: str
    owner: str
    scopes: tuple[Scope, ...]
    created_at: datetime
    expires_at: datetime | None
    note: str


class TokenCreated(TokenView):
    token: str
    """The bearer token: shown once, stored as a hash only."""


class TokenList(Wire):
    items: tuple[TokenView, ...]


class Identity(Wire):
    """Whom a token belongs to."""

    team: str
    owner: str
    scopes: tuple[Scope, ...]


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


class SecretValue(Config):
    value: Annotated[Text, Field(min_length=1, max_length=32_768, json_schema_extra={"pattern": "^[^\\u0000]*$"})]
    """Encrypted before it is stored; never shown again."""


class SecretList(Wire):
    names: tuple[EnvName, ...]
