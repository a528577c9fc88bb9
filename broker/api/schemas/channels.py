"""Notification channels on the wire."""

from datetime import datetime
from typing import Annotated, Any

from pydantic import Field

from broker.api.schemas.base import Wire
from broker.domain.spec import Name
from trainer.contract.base import Config, Text, matching

Pattern = Annotated[
    str,
    matching(
        r"^([a-z_]+(\.[a-z_]+)*(\.\*)?|\*)$",
        "must be a kind of event, for example job.succeeded or attempt.*",
        max_length=64,
    ),
]
"""A kind of event (`job.succeeded`), or a prefix (`attempt.*`)."""
SettingName = Annotated[str, matching(r"^[a-z_]+$", "must be a-z and _", max_length=32)]


class ChannelRequest(Config):
    kind: SettingName
    """`webhook` or `slack`."""
    name: Name
    team: Name | None = None
    """Team of the channel, for admins; absent: your own."""
    installation: bool = False
    """True: the channel has no team and receives the events of all teams (admins only)."""
    events: Annotated[tuple[Pattern, ...], Field(max_length=50)] = ()
    """Events to send; empty: all."""
    config: Annotated[dict[SettingName, Annotated[Text, Field(max_length=200)]], Field(max_length=20)] = Field(
        default_factory=dict
    )
    secrets: Annotated[dict[SettingName, Annotated[Text, Field(max_length=2000)]], Field(max_length=20)] = Field(
        default_factory=dict, repr=False
    )
    """Secrets, stored encrypted and never shown: a webhook's `url`, Slack's `bot_token`."""


class ChannelChange(Config):
    """Changes of a channel. Absent fields stay unchanged."""

    events: Annotated[tuple[Pattern, ...], Field(max_length=50)] | None = None
    enabled: bool | None = None
    """true: clear the failures and deliver the backlog; false: stop deliveries."""


class ChannelView(Wire):
    id: str
    kind: str
    name: str
    team: str | None
    """Team of the channel; null: the installation."""
    events: tuple[str, ...]
    config: dict[str, Any]
    created_at: datetime
    enabled: bool
    reason: str
    """Reason why the channel is disabled, or the fault of its last delivery."""
    failures: int
    """Failed deliveries in a row."""
    waiting: int
    """Number of waiting deliveries."""
    oldest_s: float
    """Age of the oldest waiting delivery in seconds."""
    dropped: dict[str, int]
    """Deliveries that were discarded or merged into a later one, by reason."""


class ChannelMade(Wire):
    id: str
    name: str
    secret: str | None
    """Signing secret, with which the receiver checks signatures. Shown in this answer only."""


class ChannelList(Wire):
    items: tuple[ChannelView, ...]


class ChannelTested(Wire):
    delivered: bool
    detail: str
    """Fault reported by the receiver, in one line."""
    seconds: float
