"""The API behind both transports, on real sockets."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import grpc

from broker.api.core.stream_limits import StreamLimits
from broker.api.grpc.server import GrpcDependencies, serving
from broker.api.http.context import AUTH, CONTENT, JOB_METRICS, METRICS, READINESS, SERVICE, STREAMS
from broker.api.service.interfaces import Settings
from broker.domain.tenancy import Scope
from broker.notify.webhook.notifier import WebhookNotifier
from broker.ports import Clock, Store
from tests.api.harness import LIMITS, SETTINGS, Running, memory_blobs
from tests.api.harness import serving as serving_http
from tests.parity.grpc_transport import GrpcTransport
from tests.parity.http_transport import HttpTransport
from tests.parity.transport import Transport

Kind = Literal["http", "grpc"]
KINDS: tuple[Kind, ...] = ("http", "grpc")


@dataclass
class ApiServers:
    """Servers of both transports. `api`: direct access to the store and the blobs behind them."""

    api: Running
    port: int
    """Port of gRPC."""
    channel: grpc.aio.Channel
    kind: Kind

    async def transport(self, owner: str = "ada", *scopes: Scope, kind: Kind | None = None) -> Transport:
        """Return a caller with a new token, by the transport that is tried or by the one that is named."""
        return self.transport_with((await self.api.token(owner, *scopes))["Authorization"], kind)

    def transport_with(self, authorization: str, kind: Kind | None = None) -> Transport:
        if (kind or self.kind) == "http":
            return HttpTransport(self.api.http, self.api.url, authorization)
        return GrpcTransport(self.channel, authorization)


def parts(api: Running) -> GrpcDependencies:
    app = api.app
    return GrpcDependencies(
        service=app[SERVICE], content=app[CONTENT], auth=app[AUTH], metrics=app[METRICS], readiness=app[READINESS],
        streams=app[STREAMS], job_metrics=app[JOB_METRICS],
    )  # fmt: skip


@asynccontextmanager
async def standing(
    store: Store,
    kind: Kind,
    *,
    settings: Settings = SETTINGS,
    limits: StreamLimits = LIMITS,
    clock: Clock | None = None,
    reflects: bool = False,
    webhooks: type[WebhookNotifier] = WebhookNotifier,
) -> AsyncIterator[ApiServers]:
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(
            serving_http(store, memory_blobs(), settings=settings, limits=limits, clock=clock, webhooks=webhooks)
        )
        port = await stack.enter_async_context(serving(parts(api), "127.0.0.1", 0, reflects=reflects, grace_s=0.1))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        yield ApiServers(api, port, channel, kind)
