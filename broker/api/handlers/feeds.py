"""Handlers: events and logs, as streams or at once."""

import json
from collections.abc import AsyncIterator

from aiohttp import web

from broker.api.core.auth import Caller
from broker.api.core.log_position import LogPiece, Position
from broker.api.http import sse
from broker.api.http.context import CONTENT, JOB_METRICS, SERVICE
from broker.api.http.downloads import TEXT, attachment, send_whole
from broker.api.http.openapi import Api, Call
from broker.api.schemas.jobs import EventList
from broker.api.schemas.metrics import MetricsQuery, MetricsView
from broker.api.schemas.queries import MAX_SEQ, EventsQuery, JobRef, LogsQuery
from broker.api.service import views
from broker.api.service.job_feed import BATCH, follow_events
from broker.api.service.jobs import Service
from broker.domain.errors import InvalidInput, Problem
from broker.domain.job import Event, Job
from broker.reporting.log_lines import LogPart

api = Api()


@api.op("GET", "/v1/jobs/{job_id}/metrics", scope="read", errors=(404, 410, 502))
async def job_metrics(call: Call, job_id: JobRef, query: MetricsQuery) -> MetricsView:
    """Show the steps of a job over all attempts, up to its last checkpoint and latest heartbeat."""
    metrics = call.request.app[JOB_METRICS]
    return await metrics.view(call.caller, job_id, after=query.after, points=query.points)


EVENT_MEDIA = (sse.MEDIA_TYPE,)


@api.op("GET", "/v1/jobs/{job_id}/events", scope="read", errors=(404,), media=EVENT_MEDIA, headers=("Last-Event-ID",))
async def job_events(call: Call, job_id: JobRef, query: EventsQuery) -> EventList | web.StreamResponse:
    """Follow the events of a job: server-sent events with `seq` as id, or a JSON list."""
    service = call.request.app[SERVICE]
    job = await service.job(call.caller, job_id)
    after = _last_seq(call, query.after)
    if query.follow == "0":
        events = await service.rows(call.caller).events(job.id, after=after, limit=BATCH)
        return EventList(items=tuple(views.event(e) for e in events))
    source = _events(service, call.caller, job, after)
    return await sse.stream(call, source, service.clock, service.settings.heartbeat_s)


async def _events(service: Service, caller: Caller, job: Job, after: int) -> AsyncIterator[sse.ServerSentEvent | None]:
    async for update in follow_events(service, caller, job, after):
        if isinstance(update, Event):
            yield sse.ServerSentEvent(event=update.kind, data=views.event(update).model_dump_json(), id=str(update.seq))
        else:
            yield None if update is None else _end_event(update)


def _end_event(job: Job) -> sse.ServerSentEvent:
    return sse.ServerSentEvent(event=sse.END, data=json.dumps({"state": job.state, "reason": job.reason}))


def _last_seq(call: Call, after: int) -> int:
    last = call.request.headers.get("Last-Event-ID")
    if not last:
        return after
    if not (last.isascii() and last.isdigit() and int(last) <= MAX_SEQ):
        raise InvalidInput(Problem(field="Last-Event-ID", message="is not the id of an event; leave it out"))
    return int(last)


LOG_MEDIA = (sse.MEDIA_TYPE, "text/plain")


@api.op("GET", "/v1/jobs/{job_id}/logs", scope="read", errors=(404, 410), media=LOG_MEDIA, headers=("Last-Event-ID",))
async def job_logs(call: Call, job_id: JobRef, query: LogsQuery) -> web.StreamResponse:
    """Follow the log of a job: server-sent events `{attempt, node, text}`, or plain text."""
    service, content = call.request.app[SERVICE], call.request.app[CONTENT]
    job = await service.job(call.caller, job_id)
    if query.follow == "0":
        part = LogPart(tail=query.tail, since=query.since, timestamps=query.timestamps == "1")
        headers = {"Content-Type": TEXT, "Content-Disposition": attachment(f"{job.id}.log")}
        async with content.log(call.caller, job, query.attempt, part) as text:
            return await send_whole(call.request, text, headers)
    position = Position.parse(call.request.headers.get("Last-Event-ID", ""))
    if query.attempt is not None:
        await content.attempt(call.caller, job, query.attempt)
    source = _log(service, call.caller, content.follow(call.caller, job, query.attempt, position), job)
    return await sse.stream(call, source, service.clock, service.settings.heartbeat_s)


async def _log(
    service: Service, caller: Caller, pieces: AsyncIterator[LogPiece | None], job: Job
) -> AsyncIterator[sse.ServerSentEvent | None]:
    async for piece in pieces:
        if piece is None:
            yield None
        else:
            data = json.dumps({"attempt": piece.attempt, "node": piece.node, "text": piece.text})
            yield sse.ServerSentEvent(event="log", data=data, id=str(piece.position))
    yield _end_event(await service.rows(caller).job(job.id) or job)
