"""Channels over the wire."""

from datetime import datetime
from typing import Annotated, Any

from pydantic import Field

from broker.api.schemas.base import Wire
from broker.domain.spec import Name
from trainer.contract.base import Config, Text, shaped

Pattern = Annotated[
    str,
    shaped(
        r"^([a-z_]+(\.[a-z_]+)*(\.\*)?|\*)$",
        "must be a kind of event, for example job.succeeded or attempt.*",
        max_length=64,
    ),
]
"""A kind of event (`job.succeeded`), or a prefix (`attempt.*`)."""
SettingName = Annotated[str, shaped(r"^[a-z_]+$", "must be a-z and _", max_length=32)]


class ChannelRequest(Config):
    kind: SettingName
    """`webhook` or `slack`."""
    name: Name
    team: Name | None = None
    """For admins; absent: the own one."""
    installation: bool = False
    """By admins: of no team, and told about all."""
    events: Annotated[tuple[Pattern, ...], Field(max_length=50)] = ()
    """Empty: all."""
    config: Annotated[dict[SettingName, Annotated[Text, Field(max_length=200)]], Field(max_length=20)] = Field(
        default_factory=dict
    )
    secrets: Annotated[dict[SettingName, Annotated[Text, Field(max_length=2000)]], Field(max_length=20)] = Field(
        default_factory=dict, repr=False
    )
    """Stored sealed, never shown: a webhook's `url`, Slack's `bot_token`."""


class ChannelChange(Config):
    """What is absent stays as it is."""

    events: Annotated[tuple[Pattern, ...], Field(max_length=50)] | None = None
    enabled: bool | None = None
    """true: failures are forgotten, and what waited is told."""


class ChannelView(Wire):
    id: str
    kind: str
    name: str
    team: str | None
    """null: the installation's."""
    events: tuple[str, ...]
    config: dict[str, Any]
    created_at: datetime
    enabled: bool
    reason: str
    """Why it is disabled, or what its last delivery failed of."""
    failures: int
    """Failed deliveries in a row."""
    waiting: int
    """Deliveries."""
    oldest_s: float
    """Seconds that the oldest of them has waited."""
    dropped: dict[str, int]
    """Deliveries that were given up, or folded into a later one, by reason."""


class ChannelMade(Wire):
    id: str
    name: str
    secret: str | None
    """What the receiver checks signatures with: shown in this answer only."""


class ChannelList(Wire):
    items: tuple[ChannelView, ...]


class ChannelTested(Wire):
    delivered: bool
    detail: str
    """What the receiver had against it, one line."""
    seconds: float
