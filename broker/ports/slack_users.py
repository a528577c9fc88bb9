"""The door to the people of Slack."""

from collections.abc import Sequence
from typing import Protocol

from broker.domain.notifications import SlackUser


class TenantSlack(Protocol):
    """Part of `TenantStore`: a team sees its own links, an operator every team's."""

    async def put_slack_user(self, link: SlackUser) -> None:
        """Makes a link, or changes the one that this person has in the team."""
        ...

    async def slack_users(self, workspace: str | None = None, user: str | None = None) -> Sequence[SlackUser]:
        """By team, workspace and user; of one workspace and person where they are given."""
        ...

    async def delete_slack_user(self, link: SlackUser) -> bool:
        """False when it is gone already."""
        ...
