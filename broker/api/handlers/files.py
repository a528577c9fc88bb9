"""Handlers: uploads and artifacts."""

from contextlib import aclosing

from aiohttp import web

from broker.api.core import problems
from broker.api.core.stream_limits import abort
from broker.api.http.context import CONTENT, DATA_IMPORTS, STREAMS
from broker.api.http.downloads import attachment, write_piece
from broker.api.http.openapi import Api, Call
from broker.api.schemas.files import ArtifactList, ArtifactView, DataImport, UploadView
from broker.api.schemas.queries import ArtifactPath, JobRef, UploadQuery
from broker.api.service import views
from broker.api.service.content import Content

api = Api()
OCTETS = "application/octet-stream"


@api.op("POST", "/v1/uploads", scope="submit", status=201, upload=OCTETS)
async def upload(call: Call, query: UploadQuery) -> UploadView | web.Response:
    """Send a data set or a .tar of code as the raw body; a spec names it by the answer's `ref`.

    The data set is read and checked now, so that submitting jobs on it is cheap.
    """
    request = call.request
    if request.content_type != OCTETS:
        return problems.problem(415, f"send {OCTETS}, not {request.content_type}")
    content: Content = request.app[CONTENT]
    async with request.app[STREAMS].slot(call.caller, call.authorization):
        body = request.content.iter_any()
        stored = await content.upload(call.caller, query.name, query.format, body, sha256=query.sha256)
    return views.upload(stored)


@api.op("POST", "/v1/imports", scope="submit", status=201, errors=(413, 429, 507))
async def import_data(call: Call, body: DataImport) -> UploadView:
    """Let the daemon read a data set of the Hub, or of an allowed host; a spec names it by the answer's `ref`.

    Only public data are read, and no address of a private network. The limits of uploads apply.
    """
    async with call.request.app[STREAMS].slot(call.caller, call.authorization):
        stored = await call.request.app[DATA_IMPORTS].fetch(call.caller, body.source, body.format)
    return views.upload(stored)


@api.op("GET", "/v1/jobs/{job_id}/artifacts", scope="read", errors=(404, 410))
async def list_artifacts(call: Call, job_id: JobRef) -> ArtifactList:
    """List the files of the job's last committed checkpoint; of a finished job, its results."""
    located = await call.request.app[CONTENT].manifest(call.caller, job_id)
    if located is None:
        return ArtifactList(step=None, complete=False, items=())
    manifest = located[1]
    items = tuple(ArtifactView.model_validate(f) for f in manifest.files)
    return ArtifactList(step=manifest.step, complete=manifest.complete, items=items)


@api.op("GET", "/v1/jobs/{job_id}/artifacts/{path:.+}", scope="read", errors=(404, 410, 502), media=(OCTETS,))
async def get_artifact(call: Call, job_id: JobRef, path: ArtifactPath) -> web.StreamResponse:
    """Download one file.

    It is checked against its hash before its last bytes are sent; a corrupt file never completes.
    """
    request = call.request
    async with request.app[STREAMS].slot(call.caller, call.authorization):
        file, pieces = await request.app[CONTENT].artifact(call.caller, job_id, path)
        async with aclosing(pieces):
            first = await anext(pieces)  # faults of the first piece can still be answered with a status
            headers = {"Content-Type": OCTETS, "ETag": f'"{file.sha256}"', "Content-Disposition": attachment(path)}
            response = web.StreamResponse(headers=headers)
            response.content_length = file.bytes
            try:
                await response.prepare(request)
                await write_piece(response, first)
                async for piece in pieces:
                    await write_piece(response, piece)
                await response.write_eof()
            except BaseException:
                abort(request)  # a part of the file was sent; only the dropped connection shows that it is incomplete
                raise
    return response
