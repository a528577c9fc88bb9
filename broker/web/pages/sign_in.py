"""Sign in by token or by one-time link, sign out, and the choice of a theme."""

from aiohttp import web

from broker.api.core.auth import Forbidden, TokenDigest, Unauthenticated, token_digest
from broker.api.http.context import ACTIONS, AUTH, SERVICE, SESSIONS
from broker.domain.errors import GpubrokerError
from broker.web.browser import (
    HOME,
    SIGN_IN,
    anonymous_form,
    check_same_origin,
    clear_session,
    cookie_name,
    error_page,
    own_path,
    redirect_to,
    set_session,
)
from broker.web.oidc.pages import OIDC, START
from broker.web.rendering import THEME_COOKIE, THEMES, rendered

YEAR_S = 31_536_000
STALE_LINK = "this link was used or has expired; run `gpubroker web` again, or sign in with a token"


async def show(request: web.Request) -> web.Response:
    """Show the form, or start a session for a one-time code.

    A code that a page of another site leads to signs in only after the user confirmed its owner.
    """
    code = request.query.get("code")
    if code is None:
        return _form(request, own_path(request.query.get("next")))
    if request.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin"):
        return _redeemed(request, code)
    token = request.app[SESSIONS].peek(code)
    if token is None:
        return _form(request, HOME, STALE_LINK, 401)
    try:
        caller = await request.app[AUTH].caller(token, "read")
    except GpubrokerError as error:
        return error_page(request, error)
    return rendered(request, "confirm.html", request.app[SERVICE].clock.now(), code=code, whom=caller)


async def sign_in(request: web.Request) -> web.Response:
    """Start a session for a token."""
    try:
        check_same_origin(request)
        form = await anonymous_form(request)
    except GpubrokerError as error:
        return error_page(request, error)
    if "code" in form:
        return _redeemed(request, form["code"])
    target, authorization = own_path(form.get("next")), f"Bearer {form.get('token', '').strip()}"
    try:
        await request.app[AUTH].caller(authorization, "read")
    except (Unauthenticated, Forbidden) as error:
        return _form(request, target, str(error), 401)
    except GpubrokerError as error:
        return error_page(request, error)
    return _started(request, token_digest(authorization), target)


def _redeemed(request: web.Request, code: str) -> web.Response:
    token = request.app[SESSIONS].redeem(code)
    return _form(request, HOME, STALE_LINK, 401) if token is None else _started(request, token, HOME)


async def sign_out(request: web.Request) -> web.Response:
    """End the session, also for a copy of its cookie."""
    try:
        check_same_origin(request)
    except GpubrokerError as error:
        return error_page(request, error)
    sessions, response = request.app[SESSIONS], redirect_to(SIGN_IN)
    try:
        session = await sessions.open(request.cookies.get(cookie_name(request), ""))
        if session is not None:
            await request.app[ACTIONS].run(sessions.end(session))
    except GpubrokerError as error:  # this browser forgets the cookie; a copy of it would still be valid
        response = error_page(request, error)
    clear_session(request, response)
    return response


async def theme(request: web.Request) -> web.Response:
    """Remember the theme."""
    try:
        check_same_origin(request)
        form = await anonymous_form(request)
    except GpubrokerError as error:
        return error_page(request, error)
    response = redirect_to(own_path(form.get("next")))
    theme = form.get("theme", "auto")
    if theme in THEMES:
        response.set_cookie(THEME_COOKIE, theme, max_age=YEAR_S, path="/ui", httponly=True, samesite="Lax")
    return response


def _form(request: web.Request, target: str, error: str = "", status: int = 200) -> web.Response:
    values = {"next": target, "error": error, "oidc": START if OIDC in request.app else None}
    return rendered(request, "sign_in.html", request.app[SERVICE].clock.now(), status, **values)


def _started(request: web.Request, token: TokenDigest, target: str) -> web.Response:
    response = redirect_to(target)
    set_session(request, response, request.app[SESSIONS].start(token))
    return response


ROUTES = (
    ("GET", SIGN_IN, show),
    ("POST", SIGN_IN, sign_in),
    ("POST", "/ui/sign-out", sign_out),
    ("POST", "/ui/theme", theme),
)
