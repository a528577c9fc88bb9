"""`AsyncClient`: the HTTP API as typed calls, for the command line and for other programs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote as escape

import aiohttp

from broker.api.schemas.base import Health, Wire
from broker.api.schemas.job_list import JobPage, JobView
from broker.client import job_names
from broker.client.resources.channels import ChannelCalls, SlackCalls
from broker.client.resources.policies import PolicyCalls
from broker.client.resources.spending import SpendingCalls
from broker.client.resources.tenancy import TenancyCalls
from broker.client.transport import connection, sse
from broker.client.transport.atomic_file import placed
from broker.client.transport.connection import Connection
from broker.client.transport.errors import ApiError, BrokenOff, DaemonUnreachable, Damaged
from broker.client.transport.http import LazySchemas, Transport, plain

if TYPE_CHECKING:
    from broker.api.schemas import files as files_schemas
    from broker.api.schemas import jobs as jobs_schemas
    from broker.api.schemas import metrics as metrics_schemas
    from broker.api.schemas import offers as offers_schemas
    from broker.api.schemas import plans as plans_schemas
    from broker.api.schemas import quotes as quotes_schemas
    from broker.api.schemas import tenancy as tenancy_schemas
    from broker.api.schemas.job_data import StoredKindView
else:
    files_schemas, jobs_schemas, offers_schemas = LazySchemas("files"), LazySchemas("jobs"), LazySchemas("offers")
    metrics_schemas = LazySchemas("metrics")
    plans_schemas, quotes_schemas, tenancy_schemas = LazySchemas("plans"), LazySchemas("quotes"), LazySchemas("tenancy")

UPLOADING = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=900)
"""Timeouts in seconds: a daemon reads and stores the whole data set before it answers."""


class LogChunk(Wire):
    """Log text of one attempt, as its node wrote it."""

    attempt: int
    node: int
    text: str


class AsyncClient(ChannelCalls, PolicyCalls, SlackCalls, SpendingCalls, TenancyCalls):
    """Client of one daemon, for `async with`. Calls raise ApiError for refusals, DaemonUnreachable without an answer.

    `job`: an id, or a name, which means the caller's live job of that name, otherwise the newest. Each call looks a
    name up again; give `job_id(name)` to calls that belong together, such as `artifacts` and `download`. `retry_for_s`:
    seconds for which a call is repeated without an answer, or after 429, 502, 503, 504. `submit` and `retry` have a key
    against duplicates; `create_token`, `rotate_channel` and `test_channel` may take effect twice. `locate` returns the
    daemon's current address before each retry. `certificate`: file of the trusted certificate of a daemon on this
    machine. An invalid address or token raises Misconfigured.
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        retry_for_s: float = 0.0,
        locate: Callable[[], Connection | None] = lambda: None,
        certificate: str = "",
    ) -> None:
        at = Connection(
            url=connection.address(url, "url"), token=connection.bearer(token, "token"), certificate=certificate
        )
        self._http = Transport(at, retry_for_s, locate)
        self._ids = set[str]()

    @classmethod
    def found(cls, url: str | None = None, token: str | None = None, *, retry_for_s: float = 0.0) -> Self:
        """Return a client of the daemon at `url`, by default of the daemon that the command line uses.

        Raises DaemonUnreachable if no daemon was ever started or logged in to, and Misconfigured.
        """
        if url is not None:
            return cls(url, token or "", retry_for_s=retry_for_s)
        location = connection.find()
        if location is None:
            raise DaemonUnreachable("any known address", "none was ever started or logged in to")
        return cls(
            location.url,
            token or location.token,
            retry_for_s=retry_for_s,
            locate=connection.find,
            certificate=location.certificate,
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    @property
    def url(self) -> str:
        return self._http.url

    # --- jobs

    async def quote(self, spec: Mapping[str, Any], *, limit: int = 100) -> quotes_schemas.QuoteView:
        return await self._call(
            "POST", "/v1/quotes", quotes_schemas.QuoteView, json=_full_form(spec), params=plain({"limit": limit})
        )

    async def what_if(self, request: Mapping[str, Any]) -> quotes_schemas.WhatIfView:
        """Estimate memory and scaling without a data set: `{"model": …, "gpu": "l40s", "gpus": [1, 8]}`."""
        return await self._call("POST", "/v1/what-if", quotes_schemas.WhatIfView, json=dict(request))

    async def offers(
        self, *, provider: str | None = None, accelerators: Sequence[str] = (), limit: int = 500
    ) -> offers_schemas.OfferList:
        """List current offers, cheapest first."""
        params = plain({"provider": provider, "accelerator": list(accelerators), "limit": limit})
        return await self._call("GET", "/v1/offers", offers_schemas.OfferList, params=params)

    async def offer_history(
        self,
        *,
        gpu: Sequence[str],
        cloud: Sequence[str] = (),
        region: Sequence[str] = (),
        market: str | None = None,
        gpus: int | None = None,
        days: int = 7,
        until: str | None = None,
        points: int = 168,
        limit: int = 50,
    ) -> offers_schemas.OfferHistoryView:
        """Return prices and availability of GPUs over time; `market`: spot or on-demand, `until`: ISO 8601."""
        params = plain({
            "gpu": list(gpu), "cloud": list(cloud), "region": list(region), "market": market, "gpus": gpus,
            "days": days, "until": until, "points": points, "limit": limit,
        })  # fmt: skip
        return await self._call("GET", "/v1/offers/history", offers_schemas.OfferHistoryView, params=params)

    async def providers(self) -> offers_schemas.ProviderList:
        return await self._call("GET", "/v1/providers", offers_schemas.ProviderList)

    async def check_providers(self) -> offers_schemas.ProviderList:
        """List providers with the check of their credentials, which asks the clouds."""
        return await self._call("POST", "/v1/providers/check", offers_schemas.ProviderList)

    async def submit(self, spec: Mapping[str, Any], *, key: str) -> JobView:
        """Submit a job, which is stored when this returns. The same key with the same spec returns the same job."""
        return await self._call("POST", "/v1/jobs", JobView, json=_full_form(spec), headers={"Idempotency-Key": key})

    async def job(self, job: str) -> jobs_schemas.JobDetail:
        return await self._call("GET", await self._job(job), jobs_schemas.JobDetail)

    async def jobs(
        self,
        *,
        states: Sequence[str] = (),
        labels: Sequence[str] = (),
        team: str | None = None,
        owner: str | None = None,
        since: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> JobPage:
        """List jobs, newest first. `labels` as `key:value`; `team` for admins; `since` in ISO 8601."""
        owner_query = {"team": team, "owner": owner}
        params = {"state": states, "label": labels, **owner_query, "since": since, "limit": limit, "cursor": cursor}
        return await self._call("GET", "/v1/jobs", JobPage, params=plain(params))

    async def cancel(self, job: str) -> JobView:
        return await self._call("POST", f"{await self._job(job, writes=True)}/cancel", JobView)

    async def retry(self, job: str, *, resume: bool, key: str) -> JobView:
        """Create a job linked to an ended one; with `resume` it continues from the last checkpoint."""
        path, params = f"{await self._job(job, writes=True)}/retry", plain({"resume": int(resume)})
        return await self._call("POST", path, JobView, params=params, headers={"Idempotency-Key": key})

    async def raise_cap(self, job: str, cap_usd: Decimal) -> JobView:
        return await self._call("PATCH", await self._job(job, writes=True), JobView, json={"cap_usd": str(cap_usd)})

    async def delete_data(self, job: str, kinds: Sequence[StoredKindView] = ()) -> jobs_schemas.JobDetail:
        """Delete stored data of an ended job; without `kinds` everything."""
        params = [("kind", kind) for kind in kinds]
        return await self._call(
            "DELETE", f"{await self._job(job, writes=True)}/data", jobs_schemas.JobDetail, params=params
        )

    async def ledger(self, job: str) -> jobs_schemas.LedgerList:
        return await self._call("GET", f"{await self._job(job)}/ledger", jobs_schemas.LedgerList)

    async def decision(self, job: str, number: int) -> plans_schemas.DecisionView:
        return await self._call("GET", f"{await self._job(job)}/decisions/{number}", plans_schemas.DecisionView)

    async def job_id(self, job: str, *, writes: bool = False) -> str:
        """Return the id of the job that a name means, for calls that belong together. An id is returned as it is.

        `writes`: refuse a name that other owners' jobs have too. Raises ApiError for an unknown (404) or ambiguous
        (409) name.
        """
        if not job_names.is_id(job):
            return await job_names.find(self, job, writes=writes)
        if job not in self._ids:
            try:
                await self._http.read("GET", _path(job))
            except ApiError as e:
                if e.problem.status == 404:
                    return await job_names.find_like_an_id(self, job, writes=writes)
            self._ids.add(job)  # any other refusal belongs to the call itself
        return job

    async def _job(self, job: str, *, writes: bool = False) -> str:
        """Return the path of a job by id or name."""
        return _path(await self.job_id(job, writes=writes))

    # --- feeds

    async def events(self, job: str, *, after: int = 0) -> AsyncIterator[jobs_schemas.EventView]:
        """Yield every event after `after`, once and in order, until the job ends. A lost connection is restored."""
        async for message in self._feed(f"{await self._job(job)}/events", str(after) if after else ""):
            yield jobs_schemas.EventView.model_validate_json(message.data)

    async def events_now(self, job: str, *, after: int = 0) -> jobs_schemas.EventList:
        """List at most 500 events."""
        params = plain({"after": after, "follow": 0})
        return await self._call("GET", f"{await self._job(job)}/events", jobs_schemas.EventList, params=params)

    async def logs(self, job: str, *, attempt: int | None = None) -> AsyncIterator[LogChunk]:
        """Yield log text as it arrives, of all attempts or of one, until the job ends."""
        async for message in self._feed(f"{await self._job(job)}/logs", "", attempt=attempt):
            yield LogChunk.model_validate_json(message.data)

    async def log_now(
        self,
        job: str,
        *,
        attempt: int | None = None,
        tail: int | None = None,
        since: str | None = None,
        timestamps: bool = False,
    ) -> str:
        """Return the log of an attempt, by default of the latest, up to now.

        `tail`: number of last lines; `since`: ISO 8601; `timestamps`: begin each line with the time of its upload.
        """
        choice = {"tail": tail, "since": since, "timestamps": int(timestamps)}
        params = plain({"attempt": attempt, "follow": 0, **choice})
        return (await self._http.read("GET", f"{await self._job(job)}/logs", params=params)).decode("utf-8", "replace")

    async def _feed(self, path: str, last: str, **parameters: Any) -> AsyncIterator[sse.ReceivedEvent]:
        """Yield messages of a stream, and resume it after a broken connection. Each message resets `retry_for_s`."""
        async for attempt in self._http.tries():
            with attempt:
                headers = {"Last-Event-ID": last} if last else {}
                async with self._http.once("GET", path, headers=headers, params=plain(parameters)) as response:
                    async for message in sse.messages(response.content):
                        if message.event == sse.END:
                            return
                        yield message
                        last = message.id or last
                        attempt.retry_state.start_time = time.monotonic()
                    raise DaemonUnreachable(self.url, "the stream was cut")

    def shell(
        self, job: str, words: Sequence[str], *, tty: bool
    ) -> AbstractAsyncContextManager[aiohttp.ClientWebSocketResponse]:
        """Run a program next to a job's agent; without words a shell.

        The frames are those of `broker.api.http.terminal`.
        """
        return self._http.socket(f"{_path(job)}/shell", params=plain({"word": list(words), "tty": int(tty)}))

    # --- files

    async def upload(self, data: bytes | Path, *, name: str, fmt: str | None = None) -> files_schemas.UploadView:
        """Store a data set or a .tar of code. Equal bytes are stored once. A file is streamed, not read into memory."""
        headers = {"Content-Type": "application/octet-stream"}
        sent: dict[str, Any] = {
            "params": plain({"name": name, "format": fmt}),
            "headers": headers,
            "timeout": UPLOADING,
        }
        async for attempt in self._http.tries():
            with attempt, nullcontext(data) if isinstance(data, bytes) else data.open("rb") as body:
                async with self._http.once("POST", "/v1/uploads", data=body, **sent) as response:
                    return files_schemas.UploadView.model_validate_json(await response.read())
        raise AssertionError("tries() returns or raises")

    async def import_data(self, source: str, *, fmt: str | None = None) -> files_schemas.UploadView:
        """Let the daemon read `hf://datasets/OWNER/NAME` or an https URL of an allowed host; use the answer's `ref`."""
        body = plain({"source": source, "format": fmt})
        return await self._call("POST", "/v1/imports", files_schemas.UploadView, json=body, timeout=UPLOADING)

    async def metrics(self, job: str, *, after: int = 0, points: int = 1000) -> metrics_schemas.MetricsView:
        """Return the steps of a job after a step, reduced to at most `points`."""
        params = plain({"after": after, "points": points})
        return await self._call("GET", f"{await self._job(job)}/metrics", metrics_schemas.MetricsView, params=params)

    async def artifacts(self, job: str) -> files_schemas.ArtifactList:
        return await self._call("GET", f"{await self._job(job)}/artifacts", files_schemas.ArtifactList)

    async def artifact(self, job: str, file: files_schemas.ArtifactView) -> bytes:
        """Return the verified bytes of a small file. Raises Damaged, BrokenOff."""
        async for attempt in self._http.tries():
            with attempt:
                return b"".join([piece async for piece in self._checked_pieces(job, file)])
        raise AssertionError("tries() returns or raises")

    async def download(self, job: str, file: files_schemas.ArtifactView, target: Path) -> None:
        """Download a file to `target`, which is replaced only by the complete, checked file.

        Raises Damaged, BrokenOff, NotSaved.
        """
        async for attempt in self._http.tries():
            with attempt, placed(target) as part:
                async with aclosing(self._checked_pieces(job, file)) as pieces:
                    async for piece in pieces:
                        part.write(piece)

    async def _checked_pieces(self, job: str, file: files_schemas.ArtifactView) -> AsyncGenerator[bytes]:
        """Yield a file's bytes, then check size and SHA-256 against the manifest. Raises Damaged, BrokenOff."""
        digest, received, began = hashlib.sha256(), 0, False
        try:
            async with self._http.once("GET", f"{await self._job(job)}/artifacts/{escape(file.path)}") as response:
                began = True
                async for piece in response.content.iter_any():
                    digest.update(piece)
                    received += len(piece)
                    yield piece
        except DaemonUnreachable:
            if not began:
                raise
            where = f"{file.path} of job {job} broke off after {received} of {file.bytes} bytes, and none was kept"
            raise BrokenOff(f"{where}; try again, and see the daemon's log if it ends there again") from None
        if received != file.bytes or digest.hexdigest() != file.sha256:
            raise Damaged(f"{file.path}: the bytes differ from the job's manifest; try again")

    # --- secrets, health

    async def secrets(self) -> tenancy_schemas.SecretList:
        return await self._call("GET", "/v1/secrets", tenancy_schemas.SecretList)

    async def put_secret(self, name: str, value: str) -> None:
        await self._http.read("PUT", f"/v1/secrets/{escape(name, safe='')}", json={"value": value})

    async def delete_secret(self, name: str) -> None:
        await self._http.read("DELETE", f"/v1/secrets/{escape(name, safe='')}")

    async def me(self) -> tenancy_schemas.Identity:
        """Return the team, owner and scopes of the token."""
        return await self._call("GET", "/v1/me", tenancy_schemas.Identity)

    async def ready(self) -> Health:
        """Return the state of each part, also of an unready daemon."""
        try:
            return await self._call("GET", "/readyz", Health)
        except ApiError as e:
            if not e.problem.errors:
                raise
            return Health(status="unavailable", checks={p.field: p.message for p in e.problem.errors})


def _path(job: str) -> str:
    return f"/v1/jobs/{escape(job, safe='')}"


def _full_form(spec: Mapping[str, Any]) -> dict[str, Any]:
    from broker.client.spec_shorthand import full_form  # its import takes time that most commands need not spend

    return full_form(spec)
