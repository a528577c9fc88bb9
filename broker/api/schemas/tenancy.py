"""Teams, tokens, secrets and the audit on the wire."""

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any

from pydantic import Field

from broker.api.schemas.base import Wire
from broker.domain.spec import EnvName, Moment, Name
from broker.domain.tenancy import Scope
from trainer.contract.base import Config, Text


class SignInLink(Wire):
    """A link that signs one browser in."""

    path: str
    """Path below the daemon's URL. The first browser that opens it is signed in."""
    expires_at: datetime


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
    """Owner that the token acts as, with the owner's secrets and uploads."""
    team: Name | None = None
    """Team whose jobs the token can read; absent: yours. Another team: operators only."""
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1, max_length=5)] = ("read", "submit")
    """read, submit, manage (the team's tokens, policies and channels), metrics, admin (every team)."""
    expires_at: Moment | None = None
    """Expiry; absent: the token never expires."""
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
    """The bearer token, shown once; only its hash is stored."""


class TokenList(Wire):
    items: tuple[TokenView, ...]


class Identity(Wire):
    """Identity and scopes of a token."""

    team: str
    owner: str
    scopes: tuple[Scope, ...]


class AuditView(Wire):
    """One write: actor, action, and the state before and after."""

    id: str
    at: datetime
    team: str
    """Team of the target; empty: the installation."""
    actor: str
    token_id: str
    """Id of the actor's token; empty: the daemon itself."""
    action: str
    target: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    usd: Decimal | None
    """Maximum dollars that this write allows to be spent; null: not a write about money."""


class AuditPage(Wire):
    items: tuple[AuditView, ...]
    next: str | None
    """`cursor` of the next page; null on the last page."""


class SecretValue(Config):
    value: Annotated[Text, Field(min_length=1, max_length=32_768, json_schema_extra={"pattern": "^[^\\u0000]*$"})]
    """Value of the secret. It is encrypted before it is stored, and never shown again."""


class SecretList(Wire):
    names: tuple[EnvName, ...]
