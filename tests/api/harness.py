"""Runs the real HTTP application on a socket over any store, for tests and benchmarks."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from broker.api.app import LEFT, REQUESTS, build_app
from broker.api.core.auth import Authenticator, hashed, mint
from broker.api.core.stream_limits import MAX_CONNECTIONS, StreamLimits
from broker.api.http.connections import Runner
from broker.api.http.context import AUTH, METRICS
from broker.api.service.interfaces import Settings
from broker.api.service.jobs import Service
from broker.api.service.quotes import QuoteService
from broker.blobs import ObstoreBlobs
from broker.daemon.preflight_adapter import Checks
from broker.domain.ids import Installation
from broker.domain.instance import Caps
from broker.domain.offer import GpuAsk, Offer, ProviderStatus
from broker.domain.tenancy import DEFAULT_TEAM, Scope
from broker.notify.log import LogNotifier
from broker.notify.webhook.notifier import WebhookNotifier
from broker.ports import Blobs, Clock, Store, Token
from broker.runtime.clock import SystemClock
from broker.runtime.secret_box import SecretBox
from broker.web.app import mount
from broker.web.oidc.config import OidcConfig
from providers.simulated.config import SimulatedConfig
from providers.simulated.market import offers
from trainer.contract import object_keys as keys
from trainer.contract.documents import Lease

CSV = "word,definition\n" + "".join(f"word{i},what word {i} means to a cynic\n" for i in range(40))
MODEL = "HuggingFaceTB/SmolLM2-135M"
SEEN = datetime(2026, 1, 1, 12, tzinfo=UTC)
SETTINGS = Settings(
    spool=Path(tempfile.gettempdir()) / f"gpubroker-spool-{os.getpid()}", upload_bytes=200_000, poll_s=0.02
)
LIMITS = StreamLimits(recheck_s=0.02)


@dataclass
class FixedMarket:
    """Market with the simulated clouds' offers at one moment; a test may replace `items`."""

    runs_on_host: bool = False
    lists_all: bool = False
    seen_at: datetime | None = SEEN
    items: Sequence[Offer] = field(default_factory=lambda: offers(SimulatedConfig(sold_out=0), GpuAsk(), SEEN, cores=2))

    def offers(self) -> Sequence[Offer]:
        return self.items

    def status(self) -> Sequence[ProviderStatus]:
        return [
            ProviderStatus(
                name="simulated", offers=len(self.items), dropped={"price 0 or less": 2}, seen_at=self.seen_at
            ),
        ]

    def caps(self) -> Mapping[str, Caps]:
        caps = Caps(spot=True, trust="own", reaches_local_files=True, simulated=True, multi_node=True)
        return {"simulated": replace(caps, runs_on_host=self.runs_on_host, lists_all=self.lists_all)}


def memory_blobs() -> ObstoreBlobs:
    return ObstoreBlobs.open("memory://", Installation("test"))


def spec(ref: str, **changes: Any) -> dict[str, Any]:
    """Return a good spec as JSON, with `changes` to its top-level keys."""
    good = {
        "name": "cynic",
        "cap_usd": "5.00",
        "train": {
            "model": MODEL,
            "data": {"path": ref, "prompt": "Define {word}:", "completion": "{definition}"},
        },
    }
    return good | changes


@dataclass
class Running:
    """Running application, with a client for its HTTP API."""

    url: str
    service: Service
    http: aiohttp.ClientSession
    market: FixedMarket
    app: web.Application

    async def token(
        self, owner: str, *scopes: Scope, team: str = DEFAULT_TEAM, expires_at: datetime | None = None
    ) -> dict[str, str]:
        """Create a token, and the team if it is new; return the headers with the token."""
        await self.service.store.put_team(team, "")
        token_id, text = mint(os.urandom)
        granted = scopes or ("read", "submit")
        row = Token(id=token_id, team=team, owner=owner, scopes=granted, created_at=SEEN, expires_at=expires_at)
        await self.service.store.put_token(row, hashed(text))
        return {"Authorization": f"Bearer {text}"}

    async def revoke(self, owner: str) -> None:
        """Revoke all tokens of an owner, as the daemon that serves the request does."""
        for token in await self.service.store.tokens():
            if token.owner == owner:
                await self.service.store.delete_token(token.id)
        self.app[AUTH].forget()

    async def upload(
        self, headers: Mapping[str, str], data: bytes | str = CSV, name: str = "words.csv"
    ) -> dict[str, Any]:
        async with self.http.post(
            f"{self.url}/v1/uploads",
            params={"name": name},
            data=data if isinstance(data, bytes) else data.encode(),
            headers={**headers, "Content-Type": "application/octet-stream"},
        ) as response:
            assert response.status == 201, await response.text()
            answer: dict[str, Any] = await response.json()
            return answer

    async def call(
        self, method: str, path: str, headers: Mapping[str, str], status: int, **options: Any
    ) -> dict[str, Any]:
        """Send a request, require the status, and return the answer's JSON."""
        async with self.http.request(method, self.url + path, headers=headers, **options) as response:
            text = await response.text()
            assert response.status == status, f"{method} {path}: {response.status} {text}"
            answer: dict[str, Any] = await response.json(content_type=None) if text else {}
            return answer


@asynccontextmanager
async def serving(
    store: Store,
    blobs: Blobs,
    *,
    clock: Clock | None = None,
    settings: Settings = SETTINGS,
    limits: StreamLimits = LIMITS,
    requests: int = REQUESTS,
    connections: int = MAX_CONNECTIONS,
    port: int = 0,
    webhooks: type[WebhookNotifier] = WebhookNotifier,
    oidc: OidcConfig | None = None,
) -> AsyncIterator[Running]:
    clock = clock or SystemClock()
    market = FixedMarket()
    box = SecretBox(b"test-only master key, 32 bytes !")
    posts = webhooks(box, clock, insecure_hosts=["127.0.0.1"])
    service = Service(
        store=store,
        blobs=blobs,
        quotes=QuoteService(store, blobs, market, Checks(None, clock), clock, settings, entropy=os.urandom),
        box=box,
        clock=clock,
        entropy=os.urandom,
        settings=settings,
        notifiers=[LogNotifier(), posts],
    )
    await blobs.put(keys.BROKER_LEASE, Lease(broker="test", seq=1, every_s=20).model_dump_json().encode())
    app = build_app(service, Authenticator(store, clock), version="0.0.0", limits=limits, requests=requests)
    mount(app, oidc)
    runner = Runner(app, max_connections=connections)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    address = runner.addresses[0]
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            yield Running(f"http://127.0.0.1:{address[1]}", service, http, market, app)
    finally:
        await runner.cleanup()
        await posts.close()
        with suppress(OSError):  # no upload created the folder, or another application still uses it
            settings.spool.rmdir()


def disconnected(api: Running, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Return an event that is set when the application has cancelled a request whose client disconnected."""
    event, metrics = asyncio.Event(), api.app[METRICS]
    served = metrics.served

    def observed(method: str, route: str, status: int, seconds: float) -> None:
        served(method, route, status, seconds)
        if status == LEFT:
            event.set()

    monkeypatch.setattr(metrics, "served", observed)
    return event
