"""The API behind both doors, on real sockets."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import grpc

from broker.api.core.stream_limits import StreamLimits
from broker.api.grpc.server import Parts, serving
from broker.api.http.context import AUTH, CONTENT, METRICS, READINESS, SERVICE, STREAMS
from broker.api.service.jobs import Settings
from broker.domain.tenancy import Scope
from broker.notify.webhook.notifier import WebhookNotifier
from broker.ports import Clock, Store
from tests.api.harness import LIMITS, SETTINGS, Running, memory_blobs
from tests.api.harness import serving as serving_http
from tests.doors.door import Door
from tests.doors.grpc_door import GrpcDoor
from tests.doors.http_door import HttpDoor

Kind = Literal["http", "grpc"]
KINDS: tuple[Kind, ...] = ("http", "grpc")


@dataclass
class House:
    """`api` is the back stairs: the store and the blobs behind the doors."""

    api: Running
    port: int
    """Of gRPC."""
    channel: grpc.aio.Channel
    kind: Kind

    async def door(self, owner: str = "ada", *scopes: Scope, kind: Kind | None = None) -> Door:
        """A caller with a new token, by the door that is tried or by the one that is named."""
        return self.door_of((await self.api.token(owner, *scopes))["Authorization"], kind)

    def door_of(self, authorization: str, kind: Kind | None = None) -> Door:
        if (kind or self.kind) == "http":
            return HttpDoor(self.api.http, self.api.url, authorization)
        return GrpcDoor(self.channel, authorization)


def parts(api: Running) -> Parts:
    app = api.app
    return Parts(
        service=app[SERVICE], content=app[CONTENT], auth=app[AUTH], metrics=app[METRICS], readiness=app[READINESS],
        streams=app[STREAMS],
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
) -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(
            serving_http(store, memory_blobs(), settings=settings, limits=limits, clock=clock, webhooks=webhooks)
        )
        port = await stack.enter_async_context(serving(parts(api), "127.0.0.1", 0, reflects=reflects, grace_s=0.1))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        yield House(api, port, channel, kind)
