"""ArtifactService: uploads and artifacts."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from broker.api.grpc import queries
from broker.api.grpc.codec import fill_message, parse
from broker.api.grpc.interceptor import GrpcCall, scope
from broker.api.proto.gpubroker.v1 import artifact_service_pb2 as pb
from broker.api.proto.gpubroker.v1 import artifact_service_pb2_grpc as stubs
from broker.api.schemas.files import ArtifactView
from broker.api.schemas.queries import DownloadQuery, UploadQuery
from broker.api.service import views
from broker.api.service.content import Content
from broker.domain.errors import InvalidInput, Problem

CHUNK_BYTES = 1024 * 1024


class ArtifactServicer(stubs.ArtifactServiceServicer):
    def __init__(self, content: Content) -> None:
        self._content = content

    @scope("submit")
    async def Upload(self, request: AsyncIterator[pb.UploadRequest], call: GrpcCall) -> pb.UploadResponse:
        first = await anext(request, None)
        if first is None or first.WhichOneof("part") != "header":
            raise InvalidInput(Problem(field="header", message="is missing; send it as the first message"))
        query = parse(first.header, UploadQuery)
        stored = await self._content.upload(call.caller, query.name, query.format, _bytes(request), sha256=query.sha256)
        return pb.UploadResponse(upload=fill_message(pb.Upload(), views.upload(stored)))

    @scope("read")
    async def ListArtifacts(self, request: pb.ListArtifactsRequest, call: GrpcCall) -> pb.ListArtifactsResponse:
        located = await self._content.manifest(call.caller, queries.job_id(request))
        if located is None:
            return pb.ListArtifactsResponse()
        manifest = located[1]
        items = [fill_message(pb.Artifact(), ArtifactView.model_validate(f)) for f in manifest.files]
        return pb.ListArtifactsResponse(step=manifest.step, complete=manifest.complete, items=items)

    @scope("read")
    async def DownloadArtifact(
        self, request: pb.DownloadArtifactRequest, call: GrpcCall
    ) -> AsyncIterator[pb.DownloadArtifactResponse]:
        job_id, query = queries.job_id(request), parse(request, DownloadQuery)
        file, pieces = await self._content.artifact(call.caller, job_id, query.path)
        if query.offset > file.bytes:
            message = f"{query.offset} is past the end; {query.path} has {file.bytes} bytes"
            raise InvalidInput(Problem(field="offset", message=message))
        view = ArtifactView.model_validate(file)
        before = query.offset
        async with aclosing(pieces):
            first = await anext(pieces)  # raises faults of the first piece before anything is sent
            yield pb.DownloadArtifactResponse(file=fill_message(pb.Artifact(), view))
            async for piece in _and_then(first, pieces):
                for start in range(before, len(piece), CHUNK_BYTES):
                    yield pb.DownloadArtifactResponse(data=piece[start : start + CHUNK_BYTES])
                before = max(0, before - len(piece))


async def _and_then(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


async def _bytes(parts: AsyncIterator[pb.UploadRequest]) -> AsyncIterator[bytes]:
    async for part in parts:
        if part.WhichOneof("part") != "data":
            raise InvalidInput(Problem(field="data", message="is missing; send only data after the header"))
        yield part.data
