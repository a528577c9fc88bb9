"""The HTTP application: middlewares, operations and the OpenAPI description."""

import asyncio
import logging
import math
from time import perf_counter

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from broker.api.core.auth import Authenticator
from broker.api.core.loop_lag import LoopLag
from broker.api.core.metrics import Metrics
from broker.api.core.problems import drop_tracebacks, problem
from broker.api.core.readiness import Readiness
from broker.api.core.request_slots import DaemonSlots
from broker.api.core.sessions import WebSessions
from broker.api.core.status_codes import again_after_s, answer_to, public_text
from broker.api.core.stream_limits import StreamLimits, Streams
from broker.api.handlers import (
    admin,
    channels,
    feeds,
    files,
    jobs,
    policies,
    shell,
    slack,
    spending,
    tenancy,
)
from broker.api.http.context import (
    ACTIONS,
    AUTH,
    CONTENT,
    DATA_IMPORTS,
    JOB_METRICS,
    METRICS,
    READINESS,
    SERVICE,
    SESSIONS,
    SLACK,
    STREAMS,
)
from broker.api.http.openapi import JSON, Api, document, mount
from broker.api.imports.data_imports import DataImports
from broker.api.service.content import Content
from broker.api.service.job_feed import JobMetricsReader
from broker.api.service.jobs import Service
from broker.api.service.slack import Slack
from broker.domain.errors import GpubrokerError, InvalidInput, Problem
from broker.runtime.background_tasks import UninterruptedActions

log = logging.getLogger(__name__)
access = logging.getLogger("gpubroker.access")
APIS: tuple[Api, ...] = (
    jobs.api, feeds.api, files.api, admin.api, tenancy.api, spending.api, slack.api, channels.api, policies.api,
)  # fmt: skip
BODY_BYTES = 4 * 1024**2
"""Maximum size of a JSON body in bytes. Uploads are streamed under their own limit."""
DEFAULT_LIMITS = StreamLimits()
REQUESTS = 256
"""Maximum number of concurrent requests, not counting open streams and probes."""
PROBES = frozenset({"/healthz", "/readyz"})
CHALLENGE = {"WWW-Authenticate": "Bearer"}
IDENTITY = "identity"
LOGGED_CHARACTERS = 512
"""Characters of a path that the access log shows."""
NOSNIFF = "nosniff"
PLAIN_ONLY = {"Accept-Encoding": IDENTITY}


def build_app(
    service: Service,
    auth: Authenticator,
    *,
    version: str,
    slacks: Slack | None = None,
    limits: StreamLimits = DEFAULT_LIMITS,
    requests: int = REQUESTS,
) -> web.Application:
    """Return the HTTP application over `service`.

    Run it with `access_log=None`, because it writes its own access log.
    """
    streams = Streams(auth, service.clock, limits)
    lag = LoopLag()
    measured = Metrics(service.store, lambda: service.skew(), lambda: streams.open, lag.largest_s)
    app = web.Application(
        middlewares=[_observed(measured), _refused, _unencoded, _bounded(streams, requests)],
        client_max_size=BODY_BYTES,
    )
    app.cleanup_ctx.append(lag.measure)
    _add_hooks(app)
    app[SERVICE] = service
    _add_content(app, service)
    app[AUTH] = auth
    app[SESSIONS] = WebSessions(service.box, service.clock, service.entropy, service.store)
    app[STREAMS] = streams
    app[SLACK] = slacks or Slack(service, None)
    app[METRICS] = measured
    app[READINESS] = _readiness(service)
    mount(app, APIS, auth)
    described = document(APIS, version=version)

    async def openapi(_: web.Request) -> web.Response:
        return web.json_response(described, content_type=JSON)

    app.router.add_get("/openapi.json", openapi)
    app[shell.OPEN_SHELLS] = shell.Shells()
    app.router.add_get(shell.PATH, shell.shell)
    return app


def _add_hooks(app: web.Application) -> None:
    app.on_response_prepare.append(_declared)
    app[ACTIONS] = actions = UninterruptedActions()
    app.on_cleanup.append(lambda _: actions.close())


def _add_content(app: web.Application, service: Service) -> None:
    app[CONTENT] = content = Content(service)
    app[DATA_IMPORTS] = DataImports(service, content)
    app[JOB_METRICS] = JobMetricsReader(service, content)


async def _declared(_: web.Request, response: web.StreamResponse) -> None:
    """Forbid browsers to guess the type of any answer: hosts and users write the content of some."""
    response.headers.setdefault("X-Content-Type-Options", NOSNIFF)


def _readiness(service: Service) -> Readiness:
    settings = service.settings
    return Readiness(
        service.store,
        service.blobs,
        service.clock,
        settings.lease_stale_s,
        lambda: service.skew(),
        lambda: service.clock_step(),
        lambda: service.claim_fault(),
        (settings.spool.parent, *filter(None, [settings.blobs])),
    )


def _observed(measured: Metrics) -> Middleware:
    """Measure latency by route, and log only method, path and status: other parts may hold secrets."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        started = perf_counter()
        status = 500
        try:
            response = await handler(request)
            status = response.status
            return response
        except (asyncio.CancelledError, ConnectionError):
            status = LEFT
            raise
        finally:
            seconds = perf_counter() - started
            resource = request.match_info.route.resource
            route = resource.canonical if resource is not None else "unknown"
            method = request.method if request.method in KNOWN_METHODS else "OTHER"
            measured.served(method, route, status, seconds)
            access.info(
                "%s %s %d %.1f ms", method, request.rel_url.raw_path[:LOGGED_CHARACTERS], status, seconds * 1000
            )

    return middleware


def _bounded(streams: Streams, requests: int) -> Middleware:
    """Refuse requests beyond a limit, so that an overloaded daemon answers instead of growing."""
    slots = DaemonSlots(requests, lambda: streams.open)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in PROBES:
            return await handler(request)
        async with slots.slot():
            return await handler(request)

    return middleware


LEFT = 499
"""Status that the metrics count when the client disconnected before the answer."""
KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


@web.middleware
async def _refused(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error with a problem document."""
    try:
        return await handler(request)
    except GpubrokerError as error:
        answer = _of_error(error)
        drop_tracebacks(error)
        return answer
    except web.HTTPException as error:
        return _of_http(error)
    except ConnectionError:
        raise
    except web.RequestPayloadError:
        return problem(400, "the body is not encoded as its headers say; correct Transfer-Encoding")
    except Exception:
        log.exception("%s %s failed", request.method, request.rel_url.raw_path)
        return problem(500, "an internal error; the server's log has the details")


@web.middleware
async def _unencoded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse an encoded body before its token is checked: the daemon inflates nothing."""
    encoding = request.headers.get("Content-Encoding", IDENTITY)
    if encoding.strip().lower() != IDENTITY:
        return problem(415, "Content-Encoding is not supported; send the body as it is", headers=PLAIN_ONLY)
    return await handler(request)


def _of_error(error: GpubrokerError) -> web.Response:
    status, again_s = answer_to(error).http, again_after_s(error)
    if isinstance(error, InvalidInput):
        return problem(status, _count(error.problems), error.problems)
    text = public_text(error)
    if text != str(error):
        log.warning("answered %d: %s", status, error)
    if again_s is not None:
        return problem(status, text, headers={"Retry-After": str(math.ceil(again_s))})
    return problem(status, text, headers=CHALLENGE if status == 401 else None)


def _count(problems: tuple[Problem, ...]) -> str:
    if len(problems) == 1:
        return f"{problems[0].field}: {problems[0].message}" if problems[0].field else problems[0].message
    return f"{len(problems)} fields are wrong; see errors"


def _of_http(error: web.HTTPException) -> web.Response:
    if error.status == 413:
        return problem(413, f"the body has more than {BODY_BYTES} bytes; send less")
    if error.status == 405:
        allowed = error.headers.get("Allow", "")
        return problem(405, f"this endpoint takes {allowed}", headers={"Allow": allowed})
    if error.status == 404:
        return problem(404, "no such endpoint; /openapi.json lists all")
    return problem(error.status, error.reason)
