"""Handlers: requests from Slack, and links of Slack users."""

from aiohttp import web

from broker.api.core import problems
from broker.api.http.context import ACTIONS, SLACK, STREAMS
from broker.api.http.openapi import Api, Call, whole_body
from broker.api.schemas import slack_users
from broker.api.service.slack import NewSlackLink

api = Api()
FORM = "application/x-www-form-urlencoded"


@api.op("POST", "/v1/slack", scope=None, upload=FORM, errors=(401, 404, 409))
async def slack_request(call: Call) -> web.Response:
    """Receive interactivity and slash commands of a Slack app (its request URL).

    Slack signs them, so no token is needed.
    """
    request = call.request
    if request.content_type != FORM:
        return problems.problem(415, f"send {FORM}, not {request.content_type}")
    headers = request.headers
    with request.app[STREAMS].requests.anonymous_body():
        body = await whole_body(request)
    accept = request.app[SLACK].accept(body, headers.get("X-Slack-Request-Timestamp"), headers.get("X-Slack-Signature"))
    await request.app[ACTIONS].run(accept)
    return web.Response()


@api.op("GET", "/v1/slack/users", scope="manage")
async def list_slack_users(call: Call) -> slack_users.SlackUserList:
    """List your team's Slack links: Slack users and the owners that they act as; for admins all."""
    links = await call.request.app[SLACK].links(call.caller)
    return slack_users.SlackUserList(items=tuple(slack_users.SlackUserMade.model_validate(link) for link in links))


@api.op("POST", "/v1/slack/users", scope="manage", status=201, errors=(404, 409))
async def link_slack_user(call: Call, body: slack_users.SlackLinkRequest) -> slack_users.SlackUserView:
    """Link a Slack user to an owner of your team. A second call changes the link."""
    wish = NewSlackLink(
        team=body.team,
        user=body.user,
        owner=body.owner,
        scopes=tuple(dict.fromkeys(body.scopes)),
        channel=body.channel,
    )
    return slack_users.SlackUserView.model_validate(await call.request.app[SLACK].link(call.caller, wish))


@api.op("DELETE", "/v1/slack/users/{user}", scope="manage", status=204, errors=(404,))
async def unlink_slack_user(call: Call, user: slack_users.Member) -> None:
    """Remove the links of a Slack user at once."""
    await call.request.app[SLACK].unlink(call.caller, user)
