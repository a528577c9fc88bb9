"""One run: its state, money, attempts, events, decision, logs, spec and receipt. Each tab is a link of its own."""

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import yaml
from aiohttp import ClientConnectionResetError, web
from pydantic import TypeAdapter, ValidationError

from broker.api.core.auth import Unauthenticated
from broker.api.core.stream_limits import abort
from broker.api.http.context import JOB_METRICS, SESSIONS, STREAMS
from broker.api.http.downloads import TEXT, attachment, send_whole
from broker.api.schemas.queries import MAX_SEQ, AttemptNumber, JobRef
from broker.api.service.job_data import check_kept
from broker.domain.errors import GpubrokerError
from broker.domain.ids import JobId
from broker.domain.job import Attempt, Job
from broker.domain.offer import OfferVerdict
from broker.web.browser import Visit, cookie_name, not_found
from broker.web.log_view import LOG_THREADS, QUERY_CHARACTERS, log_around, log_end, log_search
from broker.web.rendering import HEADERS
from broker.web.routes import Routes
from broker.web.run_state import receipt, run_state
from broker.web.timeline import timeline

routes = Routes()
JOB = TypeAdapter[JobId](JobRef)
NUMBER = TypeAdapter[int](AttemptNumber)
TABS = (("", "Overview"), ("events", "Events"), ("decision", "Decision"), ("logs", "Logs"), ("spec", "Spec"))
NO_FAULTS: Mapping[str, str] = {}
EVENTS = 500
SHOWN_OFFERS = 300
PLOT_POINTS = 2000
STREAM_HEADERS = {
    **HEADERS,
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}


async def job_of_team(visit: Visit, job_id: str) -> Job:
    """Return a job of the caller's team. Raises NotFound, also for a text that is not an id."""
    try:
        job_key = JOB.validate_python(job_id)
    except ValidationError:
        raise not_found(f"job {job_id[:20]!r}; the list of jobs shows yours") from None
    return await visit.service.job(visit.caller, job_key)


async def run_values(visit: Visit, job: Job, tab: str, faults: Mapping[str, str] = NO_FAULTS) -> dict[str, Any]:
    """Return what every tab of a run shows. `faults`: the API's line for each field of a form that was refused."""
    attempts = await visit.service.attempts(visit.caller, job)
    now = visit.service.clock.now()
    return {
        "job": job,
        "attempts": attempts,
        "run": run_state(job, attempts, now),
        "receipt": receipt(job, attempts),
        "timeline": timeline(attempts, now),
        "tab": tab,
        "tabs": TABS,
        "faults": faults,
        "key": visit.service.entropy(12).hex(),
        "lead_s": visit.service.settings.drain_budget.lead_s,
    }


@routes.get("/ui/jobs/{job_id}")
async def overview(visit: Visit, job_id: str) -> web.Response:
    """Show state, money and attempts, and the latest events."""
    job = await job_of_team(visit, job_id)
    template = "run_live.html" if visit.request.query.get("part") == "live" else "run.html"
    return visit.page(template, **await run_values(visit, job, ""))


@routes.get("/ui/jobs/{job_id}/events")
async def events(visit: Visit, job_id: str) -> web.Response:
    """Show events in their order, `EVENTS` at a time."""
    job = await job_of_team(visit, job_id)
    after = _number(visit.request.query.get("after", "0"), MAX_SEQ)
    rows = await visit.service.rows(visit.caller).events(job.id, after=after, limit=EVENTS)
    more = rows[-1].seq if len(rows) == EVENTS else None
    return visit.page("run_events.html", **await run_values(visit, job, "events"), events=rows, after=after, more=more)


def _number(text: str, maximum: int) -> int:
    return min(int(text), maximum) if text.isascii() and text.isdigit() and len(text) < 12 else 0


@routes.get("/ui/jobs/{job_id}/decision")
async def decision(visit: Visit, job_id: str) -> web.Response:
    """Show every offer that was considered at a purchase, kept ones first, with the reason."""
    job = await job_of_team(visit, job_id)
    values = await run_values(visit, job, "decision")
    number = _attempt_number(visit, values["attempts"])
    offers = await visit.service.decision(visit.caller, job.id, number) if number else ()
    kept_count = sum(offer.drop is None for offer in offers)
    offers_shown = sorted(offers, key=lambda offer: offer.drop is not None)[:SHOWN_OFFERS]
    return visit.page(
        "run_decision.html",
        **values,
        number=number,
        offers=offers_shown,
        total=len(offers),
        kept=kept_count,
        KEPT=OfferVerdict.KEPT,
    )


def _attempt_number(visit: Visit, attempts: list[Attempt]) -> int:
    """Return the attempt that the URL names, by default the latest; 0: there is none. Raises NotFound."""
    text = visit.request.query.get("attempt")
    if text is None:
        return attempts[-1].number if attempts else 0
    try:
        return NUMBER.validate_python(text)
    except ValidationError:
        raise not_found("such attempt; the links name all") from None


@routes.get("/ui/jobs/{job_id}/logs")
async def logs(visit: Visit, job_id: str) -> web.Response:
    """Show the end of an attempt's log, the lines around `line`, or the lines that contain the text `find`."""
    job = await job_of_team(visit, job_id)
    values = await run_values(visit, job, "logs")
    number = _attempt_number(visit, values["attempts"])
    values |= {"number": number, "log": None, "search": None, "gone": "", "bytes": 0}
    values["find"] = visit.request.query.get("find", "")[:QUERY_CHARACTERS]
    values["line"] = _number(visit.request.query.get("line", ""), MAX_SEQ)
    try:
        if number:
            async with visit.content.log(visit.caller, job, number) as raw:
                values |= await _shown_part(visit, raw, values["find"], values["line"])
    except GpubrokerError as error:
        check_kept_message(job, error)
        values["gone"] = str(error)
    return visit.page("run_logs.html", **values)


async def _shown_part(visit: Visit, raw: bytes, find: str, line: int) -> dict[str, Any]:
    """Return what the page shows of a log."""
    run = partial(visit.request.app[LOG_THREADS].stoppable, visit.caller.team)
    if find:
        return {"search": await run(lambda check: log_search(raw, find, check)), "bytes": len(raw)}
    part = await run(lambda check: log_around(raw, line, check) if line else log_end(raw, check))
    return {"log": part, "bytes": len(raw)}


def check_kept_message(job: Job, error: GpubrokerError) -> None:
    """Raise the error unless it says that the job's logs were deleted, which the page shows in place of the log."""
    try:
        check_kept(job, "logs")
    except GpubrokerError:
        return
    raise error


@routes.get("/ui/jobs/{job_id}/logs.txt", streams=True)
async def log_file(visit: Visit, job_id: str) -> web.StreamResponse:
    """Download an attempt's log."""
    job = await job_of_team(visit, job_id)
    number = _attempt_number(visit, list(await visit.service.attempts(visit.caller, job)))
    name = attachment(f"{job.id}-{number}.log")
    headers = {**HEADERS, "Content-Type": TEXT, "Content-Disposition": name, "Cache-Control": "no-store"}
    if not number:
        return web.Response(headers=headers)
    async with visit.content.log(visit.caller, job, number) as raw:
        return await send_whole(visit.request, raw, headers)


@routes.get("/ui/jobs/{job_id}/metrics.json")
async def metrics(visit: Visit, job_id: str) -> web.Response:
    """Answer with the run's steps, for the plot."""
    job = await job_of_team(visit, job_id)
    view = await visit.request.app[JOB_METRICS].view(visit.caller, job.id, after=0, points=PLOT_POINTS)
    headers = {**HEADERS, "Cache-Control": "no-store"}
    return web.Response(text=view.model_dump_json(), content_type="application/json", headers=headers)


@routes.get("/ui/jobs/{job_id}/spec")
async def spec(visit: Visit, job_id: str) -> web.Response:
    """Show the spec as YAML."""
    job = await job_of_team(visit, job_id)
    document = job.spec.model_dump(mode="json", exclude_unset=True)
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
    return visit.page("run_spec.html", **await run_values(visit, job, "spec"), yaml=text)


@routes.get("/ui/jobs/{job_id}/stream", streams=True)
async def stream(visit: Visit, job_id: str) -> web.StreamResponse:
    """Send an event whenever something of the run has changed, and `end` when it has ended or the session has."""
    job = await job_of_team(visit, job_id)
    response = web.StreamResponse(headers=STREAM_HEADERS)
    try:
        async with visit.request.app[STREAMS].slot(visit.caller, visit.session.token):
            with contextlib.suppress(ClientConnectionResetError):
                await response.prepare(visit.request)
                await _send_changes(visit, job, response)
                await response.write(b"event: end\ndata: 1\n\n")
                await response.write_eof()
    except Unauthenticated:
        if not response.prepared:
            raise
        abort(visit.request)
    return response


async def _send_changes(visit: Visit, job: Job, response: web.StreamResponse) -> None:
    clock, settings = visit.service.clock, visit.service.settings
    latest, sent_at = await _fingerprint(visit, job), clock.monotonic()
    cookie = visit.request.cookies.get(cookie_name(visit.request), "")
    while await visit.request.app[SESSIONS].open(cookie) is not None:
        await visit.service.rows(visit.caller).wait(f"job/{job.id}", settings.poll_s)
        mark = await _fingerprint(visit, job)
        if mark != latest:
            latest, sent_at = mark, clock.monotonic()
            await response.write(b"event: changed\ndata: 1\n\n")
        elif clock.monotonic() - sent_at >= settings.heartbeat_s:
            sent_at = clock.monotonic()
            await response.write(b": alive\n\n")
        if mark is None:
            return


async def _fingerprint(visit: Visit, job: Job) -> tuple[object, ...] | None:
    """Return what the page shows and may change; None: the run is over."""
    current = await visit.service.job(visit.caller, job.id)
    attempts = await visit.service.attempts(visit.caller, current)
    latest = attempts[-1] if attempts else None
    if run_state(current, attempts, visit.service.clock.now()).is_over and (latest is None or not latest.live):
        return None
    beat = latest.beat.seq if latest is not None and latest.beat is not None else None
    charged = sum(a.charged_usd for a in attempts)
    now = latest.state if latest is not None else None
    return current.state, current.reason, current.cap_usd, len(attempts), now, beat, charged
