"""Mounts the pages on the daemon's HTTP application."""

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from broker.runtime.cpu_threads import CpuThreads
from broker.web import browser, static_files
from broker.web.anonymous_forms import ANONYMOUS_FORMS, AnonymousForms
from broker.web.log_view import LOG_THREADS
from broker.web.oidc.config import OidcConfig
from broker.web.oidc.pages import CALLBACK, OIDC, START, OidcSignIn
from broker.web.pages import (
    compare,
    estimate,
    invoice,
    jobs,
    market,
    new_job,
    run,
    run_actions,
    selected_jobs,
    sign_in,
    system,
)
from broker.web.pages.team import approvals, audit, channels, policies, secrets, tokens
from broker.web.routes import Routes

log = logging.getLogger(__name__)
JOBS = (jobs.routes, selected_jobs.routes, new_job.routes, compare.routes, run.routes, run_actions.routes)
ADMINISTRATION = (
    tokens.routes, secrets.routes, channels.routes, policies.routes, approvals.routes, audit.routes, system.routes,
)  # fmt: skip
PAGES: tuple[Routes, ...] = (*JOBS, market.routes, invoice.routes, estimate.routes, *ADMINISTRATION)
Serve = Callable[[web.Request], Awaitable[web.StreamResponse]]


def mount(app: web.Application, oidc: OidcConfig | None = None) -> None:
    """Add the pages below `/ui`, and the redirect of browsers from `/`. `oidc` None: sign-in by token only.

    Raises InvalidInput if the client's secret cannot be read.
    """
    app[ANONYMOUS_FORMS] = AnonymousForms()
    app[LOG_THREADS] = CpuThreads()
    app.router.add_get("/", _root)
    app.router.add_get("/ui", _home)
    app.router.add_get(static_files.PREFIX + "{path:.+}", _guarded(static_files.serve))
    for method, path, serve in sign_in.ROUTES:
        app.router.add_route(method, path, _guarded(serve))
    if oidc is not None:
        app[OIDC] = sign_in_by_provider = OidcSignIn(app, oidc)
        app.router.add_get(START, _guarded(sign_in_by_provider.start), allow_head=False)
        app.router.add_get(CALLBACK, _guarded(sign_in_by_provider.finish), allow_head=False)
    for routes in PAGES:
        for route in routes.items:
            page = browser.signed_in(route.handler, route.scope, runs_to_end=route.runs_to_end, streams=route.streams)
            app.router.add_route(route.method, route.path, _guarded(page))
    app.router.add_route("*", "/ui/{rest:.*}", _unknown)


async def _root(request: web.Request) -> web.Response:
    """Send browsers to the pages; programs get the API's answer for an unknown path."""
    if "text/html" not in request.headers.get("Accept", ""):
        raise web.HTTPNotFound
    return browser.redirect_to(browser.HOME)


async def _home(request: web.Request) -> web.Response:
    return browser.redirect_to(browser.HOME)


async def _unknown(request: web.Request) -> web.Response:
    return browser.status_page(request, 404, ["no such page; the list of jobs leads to all"])


def _guarded(serve: Serve) -> Serve:
    """Answer a fault of a page with the page of errors, and log the fault."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        try:
            if not browser.has_valid_host(request):
                return browser.status_page(request, 400, ["the Host header names no host and port; correct it"])
            return await serve(request)
        except web.HTTPNotFound:
            return await _unknown(request)
        except (web.HTTPException, web.RequestPayloadError, ConnectionError):
            raise
        except Exception:
            log.exception("the page %s failed", request.rel_url.raw_path)
            return browser.status_page(request, 500, ["an internal error; the server's log has the details"])

    return guarded
