"""One request of a browser: its cookie, its session, its caller, and the checks before a handler runs."""

import asyncio
import ipaddress
import posixpath
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from aiohttp import web

from broker.api.core.auth import Caller, Forbidden, Unauthenticated
from broker.api.core.problems import NotFound, TooLarge, drop_tracebacks
from broker.api.core.sessions import SESSION_S, BrowserSession
from broker.api.core.status_codes import answer_to, public_text
from broker.api.http.context import ACTIONS, AUTH, CONTENT, SERVICE, SESSIONS, STREAMS
from broker.api.http.openapi import BODY_S, body_size
from broker.api.service.content import Content
from broker.api.service.jobs import Service
from broker.domain.errors import GpubrokerError, InvalidInput, Problem
from broker.domain.tenancy import Scope
from broker.web.anonymous_forms import ANONYMOUS_FORMS
from broker.web.rendering import HEADERS, rendered

SECURE_COOKIE = "__Host-gpubroker"
SIGN_IN = "/ui/sign-in"
HOME = "/ui/jobs"
OWN_PATH = re.compile(r"/ui[A-Za-z0-9._~/-]*(\?[!-\[\]-~]*)?")
"""A path of these pages with its query."""
FIELDS = 200
"""Maximum number of fields of a form."""
FORM_BYTES = 256 * 1024
"""Maximum bytes of a form, because the event loop parses it. Files come as multipart forms."""


def is_loopback(request: web.Request) -> bool:
    """Return True if the browser reached this daemon by plain HTTP at an address of its own host."""
    host = urlsplit(f"//{request.host}").hostname or ""
    if request.secure:
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def has_valid_host(request: web.Request) -> bool:
    """Return False if the Host header names no host and port."""
    try:
        return urlsplit(f"//{request.host}").port != 0
    except ValueError:
        return False


def cookie_name(request: web.Request) -> str:
    """Return the session cookie's name. Browsers share cookies among ports, so on loopback the name has the port."""
    if is_loopback(request):
        return f"gpubroker-{urlsplit(f'//{request.host}').port or 80}"
    return SECURE_COOKIE


def set_session(request: web.Request, response: web.Response, cookie: str) -> None:
    response.set_cookie(
        cookie_name(request),
        cookie,
        max_age=SESSION_S,
        path="/",
        httponly=True,
        samesite="Strict",
        secure=not is_loopback(request),
    )


def clear_session(request: web.Request, response: web.Response) -> None:
    response.del_cookie(cookie_name(request), path="/", secure=not is_loopback(request), httponly=True)


def own_path(path: str | None) -> str:
    """Return a path of these pages; HOME for any other address, so that no answer redirects to another site."""
    if path is None or len(path) > 2000 or "//" in path.partition("?")[0] or not OWN_PATH.fullmatch(path):
        return HOME
    is_sign_in = posixpath.normpath(path.partition("?")[0]).startswith(SIGN_IN)
    return HOME if is_sign_in else path  # a link with a code would sign the visitor in as another user


def redirect_to(path: str) -> web.Response:
    """Return a redirect to a page of this daemon."""
    return web.Response(status=303, headers={**HEADERS, "Location": path, "Cache-Control": "no-store"})


def check_same_origin(request: web.Request) -> None:
    """Raise Forbidden for a write that another site's page may have started."""
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    try:
        same_host = origin is not None and urlsplit(origin).netloc == request.host
    except ValueError:
        same_host = False
    if not (site == "same-origin" if site is not None else same_host):
        raise Forbidden("this request came from a page of another site; open the form here and send it again")


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One request of a signed-in browser."""

    request: web.Request
    caller: Caller
    session: BrowserSession

    @property
    def service(self) -> Service:
        return self.request.app[SERVICE]

    @property
    def content(self) -> Content:
        return self.request.app[CONTENT]

    def page(self, template: str, status: int = 200, **values: Any) -> web.Response:
        """Return a page for this caller."""
        values.setdefault("caller", self.caller)
        return rendered(self.request, template, self.service.clock.now(), status, **values)

    async def form(self) -> dict[str, str]:
        """Return the fields of a form, the last value of each. Raises TooLarge, InvalidInput."""
        try:
            async with asyncio.timeout(BODY_S):
                raw = await self.request.read()
        except TimeoutError:
            raise _not_a_form() from None
        if len(raw) > FORM_BYTES:
            raise TooLarge(f"the form has more than {FORM_BYTES >> 10} KiB; send less")
        return _fields(raw)


async def anonymous_form(request: web.Request) -> dict[str, str]:
    """Return the fields of a form of a caller without a session. Raises Overloaded, TooLarge, InvalidInput."""
    return _fields(await request.app[ANONYMOUS_FORMS].read(request))


def _fields(raw: bytes) -> dict[str, str]:
    try:
        fields = parse_qs(raw.decode(), keep_blank_values=True, max_num_fields=FIELDS)
    except ValueError:
        raise _not_a_form() from None
    return {name: values[-1] for name, values in fields.items()}


def _not_a_form() -> InvalidInput:
    return InvalidInput(Problem(field="body", message="is not a form of this page; send it again"))


def key_of(form: Mapping[str, str]) -> str | None:
    """Return the form's idempotency key; None: it has none. Raises InvalidInput."""
    key = form.get("key", "")[:100]
    if not (key.isascii() and key.isprintable()):
        raise _not_a_form()
    return key or None


VisitHandler = Callable[..., Coroutine[Any, Any, web.StreamResponse]]


def signed_in(
    handler: VisitHandler, scope: Scope, *, runs_to_end: bool = False, streams: bool = False
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return a handler that runs `handler(visit, **path parameters)` for a session whose token has the scope.

    `runs_to_end`: True if the handler is not cancelled when the browser disconnects.
    """

    async def serve(request: web.Request) -> web.StreamResponse:
        caller = None
        try:
            if request.method != "GET":
                check_same_origin(request)
            visit = await _visit(request, scope)
            caller = visit.caller
            slots = request.app[STREAMS].requests
            with nullcontext() if streams else slots.request(caller.team, body_size(request)):
                answer = handler(visit, **request.match_info)
                return await (request.app[ACTIONS].run(answer) if runs_to_end else answer)
        except Unauthenticated:
            return _to_sign_in(request)
        except GpubrokerError as error:
            return error_page(request, error, caller)

    return serve


async def _visit(request: web.Request, scope: Scope) -> Visit:
    cookie = request.cookies.get(cookie_name(request))
    session = None if cookie is None else await request.app[SESSIONS].open(cookie)
    if session is None:
        raise Unauthenticated("sign in")
    caller = await request.app[AUTH].caller(session.token, scope)
    return Visit(request=request, caller=caller, session=session)


def _to_sign_in(request: web.Request) -> web.Response:
    """Return the redirect to the sign-in page, which afterwards returns the user to this page.

    Browsers send no strict cookie when they follow a link of another site. The answer to such a request is a page that
    loads the same address again, then with the cookie.
    """
    if request.method == "GET" and request.headers.get("Sec-Fetch-Site") == "cross-site":
        return rendered(request, "reload.html", request.app[SERVICE].clock.now())
    target = f"{SIGN_IN}?next={quote(request.path_qs, safe='')}" if request.method == "GET" else SIGN_IN
    if request.headers.get("HX-Request") == "true":
        return web.Response(status=401, headers={**HEADERS, "HX-Redirect": SIGN_IN})
    return redirect_to(target)


def error_page(request: web.Request, error: GpubrokerError, caller: Caller | None = None) -> web.Response:
    """Return the page of an error, with the same status and text as the API's answer."""
    lines = [public_text(error)]
    if isinstance(error, InvalidInput):
        lines = [f"{p.field}: {p.message}" if p.field else p.message for p in error.problems]
    drop_tracebacks(error)
    return status_page(request, answer_to(error).http, lines, caller)


def status_page(request: web.Request, status: int, lines: list[str], caller: Caller | None = None) -> web.Response:
    title, now = HTTPStatus(status).phrase, request.app[SERVICE].clock.now()
    return rendered(request, "error.html", now, status, title=title, lines=lines, code=status, caller=caller)


def not_found(what: str) -> NotFound:
    return NotFound(f"no {what}")
