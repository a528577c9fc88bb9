"""Settings of the OpenID Connect sign-in."""

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from broker.domain.tenancy import DEFAULT_TEAM
from trainer.contract.base import Config

VISIBLE = re.compile(r"[!-~]+")
"""Characters of an address."""
GroupScope = Literal["read", "submit", "manage", "admin"]


class OidcGroupConfig(Config):
    """Team and scopes of the members of one group of the provider."""

    team: Annotated[str, Field(min_length=1, max_length=64)] = DEFAULT_TEAM
    """Team of the group's members; it must exist."""
    scopes: Annotated[tuple[GroupScope, ...], Field(min_length=1)] = ("read", "submit")
    """Scopes of the group's members, `read` among them: `read`, `submit`, `manage`, `admin`."""

    @field_validator("scopes")
    @classmethod
    def _readable(cls, scopes: tuple[GroupScope, ...]) -> tuple[GroupScope, ...]:
        if not {"read", "admin"} & set(scopes):
            raise ValueError("must have read; the pages need it")
        return scopes


class OidcConfig(Config):
    """Sign-in by an OpenID Connect provider; see docs/guide/teams.md."""

    issuer: Annotated[str, Field(max_length=500)]
    """Address of the provider, as its tokens name it; plain HTTP on loopback only."""
    client_id: Annotated[str, Field(min_length=1, max_length=255)]
    """Id of gpubroker at the provider."""
    client_secret_file: Path | None = None
    """File of the client's secret; absent: a public client, which PKCE alone protects."""
    public_url: Annotated[str, Field(max_length=500)]
    """Address at which browsers reach the daemon; the provider must allow it with `/ui/sign-in/oidc/callback`."""
    private_address: bool = False
    """true: the provider may have a private address; false: public addresses only, unless the issuer is on loopback."""
    scopes: tuple[str, ...] = ("openid", "profile", "email")
    """Scopes that the provider is asked for, `openid` among them."""
    owner_claim: Annotated[str, Field(min_length=1, max_length=100)] = "sub"
    """Claim that names the owner. It must be unique at the provider, and its users must not be able to change it."""
    groups_claim: Annotated[str, Field(min_length=1, max_length=100)] = "groups"
    """Claim that lists the user's groups."""
    groups: Annotated[dict[str, OidcGroupConfig], Field(min_length=1)]
    """Team and scopes by group. The first of a user's groups decides the team; other groups of that team add scopes."""

    @field_validator("issuer", "public_url")
    @classmethod
    def _private(cls, url: str) -> str:
        if not is_private(url):
            raise ValueError("must be https, since codes and tokens go there; plain HTTP on loopback only")
        return url

    @field_validator("scopes")
    @classmethod
    def _openid(cls, scopes: tuple[str, ...]) -> tuple[str, ...]:
        if "openid" not in scopes:
            raise ValueError("must have openid")
        return scopes


def is_private(url: str) -> bool:
    """Return True for an https address, or a plain HTTP address of loopback."""
    if not VISIBLE.fullmatch(url):  # `urlsplit` removes line breaks, which would end a header
        return False
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        return False
    if not host or parts.username is not None or parts.fragment:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback_url(url))


def is_loopback_url(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
