"""Calls about who of Slack acts as whom."""

from urllib.parse import quote as escape

from broker.api.schemas import slack_users as wire
from broker.client.resources.base import Calls


class SlackCalls(Calls):
    async def slack_users(self) -> wire.SlackUserList:
        """Of the own team; for admins of all."""
        return await self._call("GET", "/v1/slack/users", wire.SlackUserList)

    async def link_slack_user(self, request: wire.SlackLinkRequest) -> wire.SlackUserView:
        body = request.model_dump(mode="json")
        return await self._call("POST", "/v1/slack/users", wire.SlackUserView, json=body)

    async def unlink_slack_user(self, user: str) -> None:
        await self._http.read("DELETE", f"/v1/slack/users/{escape(user, safe='')}")
