"""Tokens of the team: list, create (shown once) and revoke."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, get_args

from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from broker.api.core.auth import Caller, Forbidden
from broker.api.core.problems import Conflict
from broker.api.http.context import AUTH
from broker.api.schemas.queries import TokenId
from broker.api.schemas.tenancy import TokenRequest
from broker.api.service.tenancy import NewToken
from broker.domain.errors import InvalidInput, Problem
from broker.domain.tenancy import Scope, ungrantable_scopes
from broker.ports import Token
from broker.web.browser import Visit, key_of, not_found, redirect_to
from broker.web.formats import moment
from broker.web.pages.team.layout import by_field, checked, echoed, removal_page, team_page
from broker.web.routes import Routes

routes = Routes()
ID = TypeAdapter[str](TokenId)
LIFETIMES = (7, 30, 90, 365)
"""Days that a new token may last."""
DEFAULT_DAYS = 90
SHOWN = 500
NO_FIELDS: Mapping[str, str] = {}


def lifetimes(caller: Caller, now: datetime) -> list[tuple[str, str]]:
    """Return (value, text) of each choice of an end. No choice ends after the caller's own token."""
    last = caller.expires_at
    days = [d for d in LIFETIMES if last is None or now + timedelta(days=d) <= last]
    end = "never" if last is None else f"with your own token, {moment(last)}"
    return [*((str(d), f"in {d} days") for d in days), ("", end)]


@routes.get("/ui/team/tokens", scope="manage")
async def tokens(visit: Visit) -> web.Response:
    """Show the team's tokens, newest first."""
    return await _page(visit)


async def _page(visit: Visit, status: int = 200, form: Mapping[str, str] = NO_FIELDS, **values: Any) -> web.Response:
    service, caller = visit.service.tenancy, visit.caller
    rows = list(reversed(await service.tokens(caller)))
    ends = lifetimes(caller, visit.service.clock.now())
    default = str(DEFAULT_DAYS) if str(DEFAULT_DAYS) in dict(ends) else ends[-1][0]
    grantable = [scope for scope in get_args(Scope) if not ungrantable_scopes(caller.scopes, [scope])]
    scopes = {scope for scope in grantable if f"scope-{scope}" in form} if form else {"read", "submit"}
    values = {"text": "", "created": None, "faults": {}, "key": visit.service.entropy(12).hex()} | values
    return team_page(
        visit, "tokens", status, tokens=rows[:SHOWN], total=len(rows), form=echoed(form), ends=ends, chosen=scopes,
        end=form.get("days", default), scopes=grantable, teams=await service.teams(caller) if caller.admin else (),
        own=caller.token_id, **values,
    )  # fmt: skip


@routes.post("/ui/team/tokens", scope="manage")
async def create(visit: Visit) -> web.Response:
    """Create a token. This answer shows its text, and no other does."""
    form = await visit.form()
    try:
        token, text = await _create(visit, form)
    except InvalidInput as error:
        return await _page(visit, 422, form, faults=by_field(error))
    except Forbidden as error:
        return await _page(visit, 403, form, faults={"scopes": str(error)})
    except Conflict as error:
        return await _page(visit, 409, form, faults={"key": str(error)})
    return await _page(visit, 201, created=token, text=text)


async def _create(visit: Visit, form: Mapping[str, str]) -> tuple[Token, str]:
    body = checked(
        TokenRequest,
        {
            "owner": form.get("owner", "").strip(),
            "team": form.get("team") or None,
            "scopes": [scope for scope in get_args(Scope) if f"scope-{scope}" in form],
            "note": form.get("note", "").strip(),
        },
    )
    wish = NewToken(
        team=body.team, owner=body.owner, scopes=body.scopes, note=body.note,
        expires_at=_expiry(form.get("days", str(DEFAULT_DAYS)), visit.service.clock.now()),
        key=key_of(form),
    )  # fmt: skip
    return await visit.service.tenancy.create_token(visit.caller, wish)


def _expiry(days: str, now: datetime) -> datetime | None:
    if days == "":
        return None
    if days not in map(str, LIFETIMES):
        raise InvalidInput(Problem(field="expires_at", message=f"{days[:20]!r} is none of the choices; choose one"))
    return now + timedelta(days=int(days))


async def _token(visit: Visit, token_id: str) -> Token:
    """Return a token of the team. Raises NotFound, also for a text that is not an id."""
    try:
        token_key = ID.validate_python(token_id)
    except ValidationError:
        raise not_found("such token; the list of tokens shows yours") from None
    for token in await visit.service.tenancy.tokens(visit.caller):
        if token.id == token_key:
            return token
    raise not_found(f"token {token_key}; the list of tokens shows yours")


@routes.get("/ui/team/tokens/{token_id}/revoke", scope="manage")
async def ask_revoke(visit: Visit, token_id: str) -> web.Response:
    """Ask before a token is revoked."""
    token = await _token(visit, token_id)
    lines: tuple[str, ...] = (
        "Programs that use it are refused at once, and its browser sessions end. Running jobs continue.",
    )
    if token.id == visit.caller.token_id:
        lines += ("This page uses this token: you will be signed out.",)
    title = f"Revoke token {token.id} of {token.owner}?"
    return removal_page(visit, title=title, lines=lines, button=f"Revoke token {token.id}", back="/ui/team/tokens")


@routes.post("/ui/team/tokens/{token_id}/revoke", scope="manage")
async def revoke(visit: Visit, token_id: str) -> web.Response:
    """Revoke a token: at once here, within seconds at other brokers."""
    token = await _token(visit, token_id)
    await visit.service.tenancy.delete_token(visit.caller, token.id)
    visit.request.app[AUTH].forget()
    return redirect_to("/ui/team/tokens")
