"""Links of Slack users on the wire."""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from broker.api.schemas.base import Wire
from broker.domain.spec import Name
from broker.domain.tenancy import Scope
from trainer.contract.base import Config, Text, matching

Member = Annotated[str, matching(r"^[UW][A-Z0-9]{2,30}$", "must be a member ID, as U012ABCDEF")]
"""Member ID, as shown in a Slack profile."""


class SlackLinkRequest(Config):
    user: Member
    owner: Name
    """Owner that the Slack user acts as."""
    team: Name | None = None
    """Team of the owner; absent: yours. Another team: operators only."""
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1, max_length=5)] = ("read", "submit")
    """read (status, spend), submit (cancel, retry, raise a cap), manage (approve); none beyond your own."""
    channel: Annotated[Text, Field(min_length=1, max_length=100)] | None = None
    """Name of the Slack channel whose workspace the user belongs to; absent: any of the team's channels."""


class SlackUserView(Wire):
    team: str
    workspace: str
    user: str
    owner: str
    scopes: tuple[Scope, ...]
    name: str
    """Name in Slack at the time of the link."""
    linked_by: str


class SlackUserMade(SlackUserView):
    linked_at: datetime


class SlackUserList(Wire):
    items: tuple[SlackUserMade, ...]
