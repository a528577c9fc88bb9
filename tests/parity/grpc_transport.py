"""gRPC transport of the parity tests, with the stubs of the daemon's package."""

import functools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar, cast

import grpc
from google.rpc import error_details_pb2, status_pb2
from pydantic import BaseModel

from broker.api.grpc.codec import plain
from broker.api.proto.gpubroker.v1 import artifact_service_pb2 as artifact
from broker.api.proto.gpubroker.v1 import artifact_service_pb2_grpc as artifact_stubs
from broker.api.proto.gpubroker.v1 import budget_service_pb2 as budget_pb
from broker.api.proto.gpubroker.v1 import budget_service_pb2_grpc as budget_stubs
from broker.api.proto.gpubroker.v1 import job_service_pb2 as job_pb
from broker.api.proto.gpubroker.v1 import job_service_pb2_grpc as job_stubs
from broker.api.proto.gpubroker.v1 import (
    offer_service_pb2,
    offer_service_pb2_grpc,
    provider_service_pb2,
    provider_service_pb2_grpc,
    quote_service_pb2,
    quote_service_pb2_grpc,
)
from broker.api.proto.gpubroker.v1.job_pb2 import JobState
from broker.api.schemas.files import ArtifactList, UploadView
from broker.api.schemas.jobs import EventView, JobDetail, JobPage, JobView, LedgerList
from broker.api.schemas.metrics import MetricsView
from broker.api.schemas.offers import OfferHistoryView, OfferList, ProviderList
from broker.api.schemas.policies import BudgetList
from broker.api.schemas.quotes import QuoteView
from tests.parity.message import write
from tests.parity.transport import TIMEOUT_S, End, Kind, Piece, Refused

CODES: dict[grpc.StatusCode, Kind] = {
    grpc.StatusCode.INVALID_ARGUMENT: "invalid",
    grpc.StatusCode.UNAUTHENTICATED: "unauthenticated",
    grpc.StatusCode.PERMISSION_DENIED: "forbidden",
    grpc.StatusCode.NOT_FOUND: "not_found",
    grpc.StatusCode.FAILED_PRECONDITION: "conflict",
    grpc.StatusCode.ALREADY_EXISTS: "conflict",
    grpc.StatusCode.DATA_LOSS: "damaged",
    grpc.StatusCode.UNAVAILABLE: "unavailable",
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline",
    grpc.StatusCode.INTERNAL: "fault",
}
CHUNK = 1000
F = TypeVar("F", bound=Callable[..., Any])
M = TypeVar("M", bound=BaseModel)


def refused(error: grpc.aio.AioRpcError) -> Refused:
    """Return the refusal, with the contents of google.rpc's details."""
    code, fields, after, reason = error.code(), {}, None, ""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(cast(bytes, value)).details:
                if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                    bad = error_details_pb2.BadRequest.FromString(detail.value)
                    fields = {v.field: v.description for v in bad.field_violations}
                elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                    wait = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay
                    after = wait.ToNanoseconds() / 1e9
                elif detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                    reason = error_details_pb2.ErrorInfo.FromString(detail.value).reason
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Refused("too_large" if reason == "TOO_LARGE" else "limited", error.details() or "", fields, after)
    return Refused(CODES[code], error.details() or "", fields, after)


def lost_by_the_client(error: grpc.aio.AioRpcError) -> bool:
    """Return True if grpc.aio lost the server's answer, which came during the send. A repeated call gets the answer."""
    return (error.details() or "").startswith("Internal error from Core")


def _one(method: F) -> F:
    @functools.wraps(method)
    async def call(*given: Any, **named: Any) -> Any:
        try:
            return await method(*given, **named)
        except grpc.aio.AioRpcError as error:
            if lost_by_the_client(error):
                return await call(*given, **named)
            raise refused(error) from None

    return cast(F, call)


def _many(method: F) -> F:
    @functools.wraps(method)
    async def call(*given: Any, **named: Any) -> AsyncIterator[Any]:
        try:
            async with aclosing(method(*given, **named)) as answers:
                async for answer in answers:
                    yield answer
        except grpc.aio.AioRpcError as error:
            raise refused(error) from None

    return cast(F, call)


@contextmanager
def _ending(call: Any) -> Iterator[Any]:
    """Yield a call, and cancel it at the end of the block."""
    try:
        yield call
    finally:
        call.cancel()


def view(message: Any, model: type[M]) -> M:
    return model.model_validate(plain(message, model))


class GrpcTransport:
    def __init__(self, channel: grpc.aio.Channel, authorization: str) -> None:
        self._metadata = (("authorization", authorization),)
        self._jobs = job_stubs.JobServiceStub(channel)
        self._budgets = budget_stubs.BudgetServiceStub(channel)
        self._quotes = quote_service_pb2_grpc.QuoteServiceStub(channel)
        self._offers = offer_service_pb2_grpc.OfferServiceStub(channel)
        self._providers = provider_service_pb2_grpc.ProviderServiceStub(channel)
        self._artifacts = artifact_stubs.ArtifactServiceStub(channel)

    async def _call(self, method: Any, request: Any, timeout_s: float = TIMEOUT_S) -> Any:
        return await method(request, metadata=self._metadata, timeout=timeout_s)

    @_one
    async def upload(self, data: bytes, *, name: str, sha256: str | None = None) -> UploadView:
        async def parts() -> AsyncIterator[artifact.UploadRequest]:
            yield artifact.UploadRequest(header=artifact.UploadHeader(name=name, sha256=sha256))
            for start in range(0, len(data), CHUNK):
                yield artifact.UploadRequest(data=data[start : start + CHUNK])

        answer = await self._call(self._artifacts.Upload, parts())
        return view(answer.upload, UploadView)

    @_one
    async def quote(self, spec: Mapping[str, Any], *, limit: int = 100) -> QuoteView:
        request = quote_service_pb2.CreateQuoteRequest(limit=limit)
        write(request.spec, spec)
        answer = await self._call(self._quotes.CreateQuote, request)
        return view(answer.quote, QuoteView)

    @_one
    async def submit(self, spec: Mapping[str, Any], *, key: str | None = None) -> tuple[JobView, bool]:
        request = job_pb.SubmitJobRequest(idempotency_key=key)
        write(request.spec, spec)
        answer = await self._call(self._jobs.SubmitJob, request)
        return view(answer.job, JobView), answer.replayed

    @_one
    async def job(self, job: str) -> JobDetail:
        answer = await self._call(self._jobs.GetJob, job_pb.GetJobRequest(job_id=job))
        return view(answer.job, JobDetail)

    @_one
    async def jobs(self, **where: Any) -> JobPage:
        answer = await self._call(self._jobs.ListJobs, write(job_pb.ListJobsRequest(), where))
        return view(answer, JobPage)

    @_one
    async def cancel(self, job: str) -> JobView:
        answer = await self._call(self._jobs.CancelJob, job_pb.CancelJobRequest(job_id=job))
        return view(answer.job, JobView)

    @_one
    async def retry(self, job: str, *, resume: bool = True, key: str | None = None) -> tuple[JobView, bool]:
        request = job_pb.RetryJobRequest(job_id=job, resume=resume, idempotency_key=key)
        answer = await self._call(self._jobs.RetryJob, request)
        return view(answer.job, JobView), answer.replayed

    @_one
    async def raise_cap(self, job: str, cap_usd: str) -> JobView:
        answer = await self._call(self._jobs.RaiseCap, job_pb.RaiseCapRequest(job_id=job, cap_usd=cap_usd))
        return view(answer.job, JobView)

    @_one
    async def approve(self, job: str, up_to_usd: str | None = None) -> JobView:
        request = job_pb.ApproveJobRequest(job_id=job, up_to_usd=up_to_usd)
        return view((await self._call(self._jobs.ApproveJob, request)).job, JobView)

    @_one
    async def refuse(self, job: str) -> JobView:
        answer = await self._call(self._jobs.RefuseJob, job_pb.RefuseJobRequest(job_id=job))
        return view(answer.job, JobView)

    @_one
    async def budgets(self) -> BudgetList:
        return view(await self._call(self._budgets.ListBudgets, budget_pb.ListBudgetsRequest()), BudgetList)

    @_one
    async def ledger(self, job: str) -> LedgerList:
        answer = await self._call(self._jobs.GetLedger, job_pb.GetLedgerRequest(job_id=job))
        return view(answer, LedgerList)

    @_one
    async def metrics(self, job: str, *, after: int | None = None, points: int | None = None) -> MetricsView:
        request = job_pb.GetMetricsRequest(job_id=job, after=after, points=points)
        return view(await self._call(self._jobs.GetMetrics, request), MetricsView)

    @_many
    async def events(
        self, job: str, *, after: int = 0, follow: bool = True, timeout_s: float = TIMEOUT_S
    ) -> AsyncIterator[EventView | End]:
        request = job_pb.WatchEventsRequest(job_id=job, after=after, follow=follow)
        with _ending(self._jobs.WatchEvents(request, metadata=self._metadata, timeout=timeout_s)) as answers:
            async for answer in answers:
                if answer.WhichOneof("part") == "end":
                    yield _end(answer.end)
                else:
                    yield view(answer.event, EventView)

    @_many
    async def logs(
        self, job: str, *, attempt: int | None = None, position: str = "", timeout_s: float = TIMEOUT_S
    ) -> AsyncIterator[Piece | End]:
        request = job_pb.FollowLogsRequest(job_id=job, attempt=attempt, position=position or None)
        with _ending(self._jobs.FollowLogs(request, metadata=self._metadata, timeout=timeout_s)) as answers:
            async for answer in answers:
                if answer.WhichOneof("part") == "end":
                    yield _end(answer.end)
                else:
                    piece = answer.chunk
                    yield Piece(piece.position, piece.attempt, piece.node, piece.text)

    @_one
    async def artifacts(self, job: str) -> ArtifactList:
        answer = await self._call(self._artifacts.ListArtifacts, artifact.ListArtifactsRequest(job_id=job))
        return view(answer, ArtifactList)

    @_one
    async def artifact(self, job: str, path: str, *, offset: int = 0) -> tuple[bytes, str]:
        request = artifact.DownloadArtifactRequest(job_id=job, path=path, offset=offset)
        data, sha256 = bytearray(), ""
        async for answer in self._artifacts.DownloadArtifact(request, metadata=self._metadata, timeout=TIMEOUT_S):
            if answer.WhichOneof("part") == "file":
                sha256 = answer.file.sha256
            data += answer.data
        return bytes(data), sha256

    @_one
    async def offers(
        self, *, provider: str | None = None, accelerator: Sequence[str] = (), limit: int | None = None
    ) -> OfferList:
        request = offer_service_pb2.ListOffersRequest(provider=provider, accelerator=accelerator, limit=limit)
        answer = await self._call(self._offers.ListOffers, request)
        return view(answer, OfferList)

    @_one
    async def offer_history(self, **where: Any) -> OfferHistoryView:
        answer = await self._call(self._offers.GetOfferHistory, offer_service_pb2.GetOfferHistoryRequest(**where))
        return view(answer, OfferHistoryView)

    @_one
    async def providers(self) -> ProviderList:
        answer = await self._call(self._providers.ListProviders, provider_service_pb2.ListProvidersRequest())
        return view(answer, ProviderList)

    @_one
    async def check_providers(self) -> ProviderList:
        answer = await self._call(self._providers.CheckProviders, provider_service_pb2.CheckProvidersRequest())
        return view(answer, ProviderList)


def _end(end: job_pb.JobEnd) -> End:
    return End(JobState.Name(end.state).removeprefix("JOB_STATE_").lower())
