"""HTTP transport of the parity tests."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import datetime
from typing import Any
from urllib.parse import quote as escape

import aiohttp

from broker.api.schemas.base import ProblemView
from broker.api.schemas.files import ArtifactList, UploadView
from broker.api.schemas.jobs import EventList, EventView, JobDetail, JobPage, JobView, LedgerList
from broker.api.schemas.metrics import MetricsView
from broker.api.schemas.offers import OfferHistoryView, OfferList, ProviderList
from broker.api.schemas.policies import BudgetList
from broker.api.schemas.quotes import QuoteView
from tests.parity.transport import TIMEOUT_S, End, Kind, Piece, Refused

KINDS: dict[int, Kind] = {
    401: "unauthenticated", 403: "forbidden", 404: "not_found", 409: "conflict", 413: "too_large", 422: "invalid",
    429: "limited", 500: "fault", 502: "damaged", 503: "unavailable",
}  # fmt: skip


class HttpTransport:
    def __init__(self, http: aiohttp.ClientSession, url: str, authorization: str) -> None:
        self._http = http
        self._url = url
        self._authorization = authorization

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, headers: Mapping[str, str] = {}, timeout_s: float = TIMEOUT_S, **request: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        sent = {"Authorization": self._authorization, **headers}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._http.request(method, self._url + path, headers=sent, timeout=timeout, **request) as found:
                if found.status >= 400:
                    problem = ProblemView.model_validate_json(await found.read())
                    fields = {p.field: p.message for p in problem.errors}
                    after = found.headers.get("Retry-After")
                    raise Refused(KINDS[found.status], problem.detail, fields, float(after) if after else None)
                yield found
        except TimeoutError:
            raise Refused("deadline", "") from None

    async def _json(self, method: str, path: str, model: Any, **request: Any) -> Any:
        async with self._open(method, path, **request) as answer:
            return model.model_validate_json(await answer.read())

    async def _job(self, path: str, key: str | None, **request: Any) -> tuple[JobView, bool]:
        headers = {} if key is None else {"Idempotency-Key": key}
        async with self._open("POST", path, headers, **request) as answer:
            return JobView.model_validate_json(await answer.read()), "Idempotent-Replay" in answer.headers

    async def upload(self, data: bytes, *, name: str, sha256: str | None = None) -> UploadView:
        headers = {"Content-Type": "application/octet-stream"}
        params = {"name": name} | ({} if sha256 is None else {"sha256": sha256})
        view: UploadView = await self._json(
            "POST", "/v1/uploads", UploadView, headers=headers, params=params, data=data
        )
        return view

    async def quote(self, spec: Mapping[str, Any], *, limit: int = 100) -> QuoteView:
        view: QuoteView = await self._json("POST", f"/v1/quotes?limit={limit}", QuoteView, json=spec)
        return view

    async def submit(self, spec: Mapping[str, Any], *, key: str | None = None) -> tuple[JobView, bool]:
        return await self._job("/v1/jobs", key, json=spec)

    async def job(self, job: str) -> JobDetail:
        view: JobDetail = await self._json("GET", f"/v1/jobs/{job}", JobDetail)
        return view

    async def jobs(self, **where: Any) -> JobPage:
        params = [(k, _text(v)) for k, given in where.items() for v in (given if isinstance(given, list) else [given])]
        view: JobPage = await self._json("GET", "/v1/jobs", JobPage, params=params)
        return view

    async def cancel(self, job: str) -> JobView:
        view: JobView = await self._json("POST", f"/v1/jobs/{job}/cancel", JobView)
        return view

    async def retry(self, job: str, *, resume: bool = True, key: str | None = None) -> tuple[JobView, bool]:
        return await self._job(f"/v1/jobs/{job}/retry?resume={int(resume)}", key)

    async def raise_cap(self, job: str, cap_usd: str) -> JobView:
        body = {"cap_usd": cap_usd}
        view: JobView = await self._json("PATCH", f"/v1/jobs/{job}", JobView, json=body)
        return view

    async def approve(self, job: str, up_to_usd: str | None = None) -> JobView:
        body = {} if up_to_usd is None else {"up_to_usd": up_to_usd}
        view: JobView = await self._json("POST", f"/v1/jobs/{job}/approve", JobView, json=body)
        return view

    async def refuse(self, job: str) -> JobView:
        view: JobView = await self._json("POST", f"/v1/jobs/{job}/refuse", JobView)
        return view

    async def budgets(self) -> BudgetList:
        view: BudgetList = await self._json("GET", "/v1/budgets", BudgetList)
        return view

    async def ledger(self, job: str) -> LedgerList:
        view: LedgerList = await self._json("GET", f"/v1/jobs/{job}/ledger", LedgerList)
        return view

    async def metrics(self, job: str, *, after: int | None = None, points: int | None = None) -> MetricsView:
        params = [(key, str(v)) for key, v in (("after", after), ("points", points)) if v is not None]
        view: MetricsView = await self._json("GET", f"/v1/jobs/{job}/metrics", MetricsView, params=params)
        return view

    async def events(
        self, job: str, *, after: int = 0, follow: bool = True, timeout_s: float = TIMEOUT_S
    ) -> AsyncIterator[EventView | End]:
        path = f"/v1/jobs/{job}/events?after={after}&follow={int(follow)}"
        if not follow:
            listed: EventList = await self._json("GET", path, EventList)
            for event in listed.items:
                yield event
            return
        async with aclosing(self._stream(path, timeout_s)) as messages:
            async for message in messages:
                if message["event"] == "end":
                    yield End(json.loads(message["data"])["state"])
                    return
                yield EventView.model_validate_json(message["data"])

    async def logs(
        self, job: str, *, attempt: int | None = None, position: str = "", timeout_s: float = TIMEOUT_S
    ) -> AsyncIterator[Piece | End]:
        path = f"/v1/jobs/{job}/logs" + ("" if attempt is None else f"?attempt={attempt}")
        headers = {"Last-Event-ID": position} if position else {}
        async with aclosing(self._stream(path, timeout_s, headers)) as messages:
            async for message in messages:
                data = json.loads(message["data"])
                if message["event"] == "end":
                    yield End(data["state"])
                    return
                yield Piece(message["id"], data["attempt"], data["node"], data["text"])

    async def _stream(
        self, path: str, timeout_s: float, headers: Mapping[str, str] = {}
    ) -> AsyncGenerator[dict[str, str], None]:
        async with self._open("GET", path, headers, timeout_s) as answer:
            fields: dict[str, str] = {}
            async for raw in answer.content:
                line = raw.decode().rstrip("\n")
                if line and not line.startswith(":"):
                    name, _, value = line.partition(": ")
                    fields[name] = value
                elif not line and fields:
                    yield fields
                    fields = {}

    async def artifacts(self, job: str) -> ArtifactList:
        view: ArtifactList = await self._json("GET", f"/v1/jobs/{job}/artifacts", ArtifactList)
        return view

    async def artifact(self, job: str, path: str) -> tuple[bytes, str]:
        async with self._open("GET", f"/v1/jobs/{job}/artifacts/{escape(path)}") as answer:
            return await answer.read(), answer.headers["ETag"].strip('"')

    async def offers(
        self, *, provider: str | None = None, accelerator: Sequence[str] = (), limit: int | None = None
    ) -> OfferList:
        params = [("accelerator", a) for a in accelerator]
        params += [(k, str(v)) for k, v in (("provider", provider), ("limit", limit)) if v is not None]
        view: OfferList = await self._json("GET", "/v1/offers", OfferList, params=params)
        return view

    async def offer_history(self, **where: Any) -> OfferHistoryView:
        params = [(key, _text(v)) for key, value in where.items() for v in (value if type(value) is list else [value])]
        view: OfferHistoryView = await self._json("GET", "/v1/offers/history", OfferHistoryView, params=params)
        return view

    async def providers(self) -> ProviderList:
        view: ProviderList = await self._json("GET", "/v1/providers", ProviderList)
        return view

    async def check_providers(self) -> ProviderList:
        view: ProviderList = await self._json("POST", "/v1/providers/check", ProviderList)
        return view


def _text(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
