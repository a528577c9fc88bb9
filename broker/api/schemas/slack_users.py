"""Links to people of Slack over the wire."""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from broker.api.schemas.base import Wire
from broker.domain.spec import Name
from broker.domain.tenancy import Scope
from trainer.contract.base import Config, Text, shaped

Member = Annotated[str, shaped(r"^[UW][A-Z0-9]{2,30}$", "must be a member ID, as U012ABCDEF")]
"""A member ID, as a profile in Slack shows it."""


class SlackLinkRequest(Config):
    user: Member
    owner: Name
    """As whom the person acts."""
    team: Name | None = None
    """Yours when absent. Another one: operators only."""
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1, max_length=5)] = ("read", "submit")
    """read (status, spend), submit (cancel, retry, raise a cap), manage (approve); none beyond your own."""
    channel: Annotated[Text, Field(min_length=1, max_length=100)] | None = None
    """Name of the Slack channel whose workspace the person is of; any of the team's when absent."""


class SlackUserView(Wire):
    team: str
    workspace: str
    user: str
    owner: str
    scopes: tuple[Scope, ...]
    name: str
    """As Slack showed it when the link was made."""
    linked_by: str


class SlackUserMade(SlackUserView):
    linked_at: datetime


class SlackUserList(Wire):
    items: tuple[SlackUserMade, ...]
