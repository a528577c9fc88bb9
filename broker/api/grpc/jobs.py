"""JobService: jobs, their events, logs and money."""

from collections.abc import AsyncIterator

from broker.api.core.log_position import LogPiece, Position
from broker.api.grpc import queries
from broker.api.grpc.codec import fill_message, parse
from broker.api.grpc.interceptor import GrpcCall, scope
from broker.api.proto.gpubroker.v1 import job_pb2 as job
from broker.api.proto.gpubroker.v1 import job_service_pb2 as pb
from broker.api.proto.gpubroker.v1 import job_service_pb2_grpc as stubs
from broker.api.schemas.jobs import CapChange, LedgerLine
from broker.api.schemas.metrics import MetricsQuery
from broker.api.schemas.policies import Approval
from broker.api.schemas.queries import DataQuery, DecisionQuery, FollowQuery, GrpcRetryQuery, JobsQuery, WatchQuery
from broker.api.service import views
from broker.api.service.content import Content
from broker.api.service.job_feed import JobMetricsReader, follow_events
from broker.api.service.jobs import Service
from broker.domain.job import Attempt, Event, Job
from broker.domain.spec import JobSpec
from broker.lifecycle.retention import KINDS

CHUNK_CHARACTERS = 256 * 1024
"""Maximum characters of one log message: at most 1 MiB."""


class JobServicer(stubs.JobServiceServicer):
    def __init__(self, service: Service, content: Content, job_metrics: JobMetricsReader) -> None:
        self._service = service
        self._content = content
        self._job_metrics = job_metrics

    @scope("submit")
    async def SubmitJob(self, request: pb.SubmitJobRequest, call: GrpcCall) -> pb.SubmitJobResponse:
        key = queries.idempotency_key(request)
        row, created = await self._service.submit(call.caller, parse(request.spec, JobSpec), key=key)
        return pb.SubmitJobResponse(job=_job(row), replayed=not created)

    @scope("read")
    async def GetJob(self, request: pb.GetJobRequest, call: GrpcCall) -> pb.GetJobResponse:
        row = await self._service.job(call.caller, queries.job_id(request))
        return pb.GetJobResponse(job=await self._detail(call, row))

    @scope("read")
    async def ListJobs(self, request: pb.ListJobsRequest, call: GrpcCall) -> pb.ListJobsResponse:
        query = parse(request, JobsQuery)
        page = await self._service.jobs(call.caller, views.job_filter(query), query.cursor)
        latest = await self._service.latest_attempts(page.jobs)
        return pb.ListJobsResponse(items=[_job(row, latest.get(row.id)) for row in page.jobs], next=page.next)

    @scope("submit")
    async def CancelJob(self, request: pb.CancelJobRequest, call: GrpcCall) -> pb.CancelJobResponse:
        return pb.CancelJobResponse(job=_job(await self._service.cancel(call.caller, queries.job_id(request))))

    @scope("submit")
    async def RetryJob(self, request: pb.RetryJobRequest, call: GrpcCall) -> pb.RetryJobResponse:
        job_id, resume = queries.job_id(request), parse(request, GrpcRetryQuery).resume
        key = queries.idempotency_key(request)
        row, created = await self._service.retry(call.caller, job_id, resume=resume, key=key)
        return pb.RetryJobResponse(job=_job(row), replayed=not created)

    @scope("submit")
    async def RaiseCap(self, request: pb.RaiseCapRequest, call: GrpcCall) -> pb.RaiseCapResponse:
        job_id, change = queries.job_id(request), parse(request, CapChange)
        return pb.RaiseCapResponse(job=_job(await self._service.raise_cap(call.caller, job_id, change.cap_usd)))

    @scope("manage")
    async def ApproveJob(self, request: pb.ApproveJobRequest, call: GrpcCall) -> pb.ApproveJobResponse:
        job_id, approval = queries.job_id(request), parse(request, Approval)
        return pb.ApproveJobResponse(
            job=_job(await self._service.policies.approve(call.caller, job_id, approval.up_to_usd))
        )

    @scope("manage")
    async def RefuseJob(self, request: pb.RefuseJobRequest, call: GrpcCall) -> pb.RefuseJobResponse:
        return pb.RefuseJobResponse(job=_job(await self._service.policies.refuse(call.caller, queries.job_id(request))))

    @scope("submit")
    async def DeleteJobData(self, request: pb.DeleteJobDataRequest, call: GrpcCall) -> pb.DeleteJobDataResponse:
        job_id, query = queries.job_id(request), parse(request, DataQuery)
        row = await self._service.stored_data.delete_data(call.caller, job_id, query.kind or KINDS)
        return pb.DeleteJobDataResponse(job=await self._detail(call, row))

    async def _detail(self, call: GrpcCall, row: Job) -> job.JobDetail:
        price = self._service.settings.storage_usd_per_gib_month
        detail = views.job_detail(row, await self._service.attempts(call.caller, row), price)
        return fill_message(job.JobDetail(), detail)

    @scope("read")
    async def GetLedger(self, request: pb.GetLedgerRequest, call: GrpcCall) -> pb.GetLedgerResponse:
        entries = await self._service.ledger(call.caller, queries.job_id(request))
        lines = (LedgerLine.model_validate(e) for e in entries)
        return pb.GetLedgerResponse(items=[fill_message(job.LedgerEntry(), line) for line in lines])

    @scope("read")
    async def GetDecision(self, request: pb.GetDecisionRequest, call: GrpcCall) -> pb.GetDecisionResponse:
        job_id, number = queries.job_id(request), parse(request, DecisionQuery).number
        return fill_message(
            pb.GetDecisionResponse(), views.decision(await self._service.decision(call.caller, job_id, number))
        )

    @scope("read")
    async def GetMetrics(self, request: pb.GetMetricsRequest, call: GrpcCall) -> pb.GetMetricsResponse:
        job_id, query = queries.job_id(request), parse(request, MetricsQuery)
        series = await self._job_metrics.view(call.caller, job_id, after=query.after, points=query.points)
        return fill_message(pb.GetMetricsResponse(), series)

    @scope("read")
    async def WatchEvents(
        self, request: pb.WatchEventsRequest, call: GrpcCall
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        query = parse(request, WatchQuery)
        row = await self._service.job(call.caller, queries.job_id(request))
        async for update in follow_events(self._service, call.caller, row, query.after):
            if isinstance(update, Event):
                yield pb.WatchEventsResponse(event=fill_message(job.Event(), views.event(update)))
            elif update is not None:
                yield pb.WatchEventsResponse(end=_job_end(update))
            elif not query.follow:
                return

    @scope("read")
    async def FollowLogs(self, request: pb.FollowLogsRequest, call: GrpcCall) -> AsyncIterator[pb.FollowLogsResponse]:
        query = parse(request, FollowQuery)
        row = await self._service.job(call.caller, queries.job_id(request))
        position = Position.parse(query.position)
        await self._content.attempt(call.caller, row, query.attempt)
        last_position = query.position
        async for piece in self._content.follow(call.caller, row, query.attempt, position):
            if piece is not None:
                for part in _log_chunks(piece, last_position):
                    yield pb.FollowLogsResponse(chunk=part)
                last_position = str(piece.position)
            elif not query.follow:
                return
        row = await self._service.job(call.caller, row.id)
        yield pb.FollowLogsResponse(end=_job_end(row))


def _log_chunks(piece: LogPiece, before: str) -> list[pb.LogChunk]:
    """Split log text into messages of allowed size.

    Only the last message carries the new position, so that a client misses no text after a lost connection.
    """
    texts = [piece.text[i : i + CHUNK_CHARACTERS] for i in range(0, len(piece.text), CHUNK_CHARACTERS)] or [""]
    chunks = [pb.LogChunk(position=before, attempt=piece.attempt, node=piece.node, text=text) for text in texts]
    chunks[-1].position = str(piece.position)
    return chunks


def _job(row: Job, latest: Attempt | None = None) -> job.Job:
    return fill_message(job.Job(), views.job(row, latest))


def _job_end(row: Job) -> pb.JobEnd:
    return pb.JobEnd(state=f"JOB_STATE_{row.state.name}", reason=row.reason)
