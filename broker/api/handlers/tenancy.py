"""Handlers: teams, tokens and the audit."""

from collections.abc import Awaitable, Callable
from functools import partial

from broker.api.core.auth import token_digest
from broker.api.http.context import ACTIONS, AUTH, SERVICE, SESSIONS
from broker.api.http.openapi import Api, Call
from broker.api.schemas import tenancy
from broker.api.schemas.queries import AuditQuery, TokenId
from broker.api.service.tenancy import NewToken
from broker.domain.spec import Name
from broker.ports import AuditFilter

api = Api()
SIGN_IN_LINK = "/ui/sign-in?code="
"""Address of a sign-in link, before its code. The code is in the query, because the access log has the path."""


@api.op("POST", "/v1/me/sign-in-links", scope="read", status=201)
async def create_sign_in_link(call: Call) -> tenancy.SignInLink:
    """Create a link that signs a browser in as this token, once, within a minute."""
    code, until = call.request.app[SESSIONS].code(token_digest(call.authorization))
    return tenancy.SignInLink(path=SIGN_IN_LINK + code, expires_at=until)


@api.op("GET", "/v1/tokens", scope="manage")
async def list_tokens(call: Call) -> tenancy.TokenList:
    """List your team's tokens, without their secrets; for admins all."""
    tokens = await call.request.app[SERVICE].tenancy.tokens(call.caller)
    return tenancy.TokenList(items=tuple(tenancy.TokenView.model_validate(t) for t in tokens))


@api.op("POST", "/v1/tokens", scope="manage", status=201)
async def create_token(call: Call, body: tenancy.TokenRequest) -> tenancy.TokenCreated:
    """Create a token for your team, with scopes that you have yourself. It is shown in this answer only."""
    wish = NewToken(
        team=body.team,
        owner=body.owner,
        scopes=tuple(dict.fromkeys(body.scopes)),
        expires_at=body.expires_at,
        note=body.note,
    )
    token, text = await call.request.app[SERVICE].tenancy.create_token(call.caller, wish)
    view = tenancy.TokenView.model_validate(token)
    return tenancy.TokenCreated(**view.model_dump(), token=text)


@api.op("DELETE", "/v1/tokens/{token_id}", scope="manage", status=204, errors=(404,))
async def delete_token(call: Call, token_id: TokenId) -> None:
    """Revoke a token: at once here, within seconds at other brokers."""
    await _and_forget(call, partial(call.request.app[SERVICE].tenancy.delete_token, call.caller, token_id))


@api.op("GET", "/v1/teams", scope="read")
async def list_teams(call: Call) -> tenancy.TeamList:
    """List your team; for admins all teams."""
    teams = await call.request.app[SERVICE].tenancy.teams(call.caller)
    return tenancy.TeamList(items=tuple(tenancy.TeamView.model_validate(t) for t in teams))


@api.op("POST", "/v1/teams", scope="admin", status=201, errors=(409,))
async def create_team(call: Call, body: tenancy.TeamRequest) -> tenancy.TeamView:
    """Create a team; give its users tokens with POST /v1/tokens."""
    team = await call.request.app[SERVICE].tenancy.create_team(call.caller, body.name, body.note)
    return tenancy.TeamView.model_validate(team)


@api.op("DELETE", "/v1/teams/{team}", scope="admin", status=204, errors=(404, 409))
async def delete_team(call: Call, team: Name) -> None:
    """Remove a team that has no job, with its tokens, secrets and uploads."""
    await _and_forget(call, partial(call.request.app[SERVICE].tenancy.delete_team, call.caller, team))


async def _and_forget(call: Call, delete: Callable[[], Awaitable[None]]) -> None:
    """Delete tokens and clear the cache of tokens, also if the client disconnects in between."""

    async def delete_and_forget() -> None:
        await delete()
        call.request.app[AUTH].forget()

    await call.request.app[ACTIONS].run(delete_and_forget())


@api.op("GET", "/v1/audit", scope="manage")
async def list_audit(call: Call, query: AuditQuery) -> tenancy.AuditPage:
    """List the writes in your team with their actors, newest first; for admins all teams."""
    where = AuditFilter(
        team=query.team,
        actor=query.actor,
        action=query.action,
        target=query.target,
        since=query.since,
        until=query.until,
        limit=query.limit,
    )
    page = await call.request.app[SERVICE].tenancy.audit(call.caller, where, query.cursor)
    return tenancy.AuditPage(items=tuple(tenancy.AuditView.model_validate(e) for e in page.entries), next=page.next)
