"""Installation with HTTP and gRPC over PostgreSQL, and the rows that hostile calls may hit."""

import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from broker.api.proto.gpubroker.v1.spec_pb2 import JobSpec
from broker.domain.errors import NotDelivered
from broker.domain.ids import JobId
from broker.domain.job import AttemptState, Event, JobState, Reason
from broker.domain.notifications import Channel, Delivery, JobSnapshot
from broker.domain.tenancy import Scope
from broker.notify.webhook.notifier import WebhookNotifier
from broker.ports import Change, State
from broker.store.embedded.server import EmbeddedPostgres
from broker.store.migrate import migrate
from broker.store.postgres.store import PostgresStore
from tests.api.harness import CSV, SEEN, Running
from tests.api.test_files import admitted, put_checkpoint
from tests.parity.grpc_transport import GrpcTransport
from tests.parity.message import write
from tests.parity.servers import ApiServers, standing
from tests.parity.test_jobs import good
from trainer.contract import object_keys as keys

ROLES: tuple[tuple[Scope, ...], ...] = (("admin",), ("read", "submit", "manage"), ("admin",), ("read",))
"""Scopes of the callers, in turn. Half of the callers are admins, because refused calls test little."""


class Nowhere(WebhookNotifier):
    """Webhook notifier that accepts every address and sends nothing."""

    async def deliver(
        self, channel: Channel, delivery: Delivery, snapshot: JobSnapshot | None, state: State | None
    ) -> State | None:
        raise NotDelivered("the receiver does not answer")


@dataclass(frozen=True, kw_only=True)
class World:
    """Three jobs of ada (one ended with results, one running with a checkpoint, one queued), and a channel of ada's."""

    servers: ApiServers
    ended: str
    running: str
    queued: str
    channel: str
    known: dict[str, list[Any]]
    """Valid values of gRPC fields, by field name."""

    async def authorization(self, seed: int) -> str:
        """Return the metadata value of a new token with the scopes of this seed's turn."""
        return (await self.servers.api.token("ada", *ROLES[seed // 2 % len(ROLES)]))["Authorization"]


@asynccontextmanager
async def world(dsn: str) -> AsyncIterator[World]:
    """Start the servers over the migrated database `dsn`, with jobs and a channel."""
    store = await PostgresStore.connect(dsn)
    try:
        async with standing(store, "grpc", reflects=True, webhooks=Nowhere) as servers:
            yield await furnished(servers)
    finally:
        await store.close()


async def furnished(servers: ApiServers) -> World:
    """Create the jobs and the channel, and return them."""
    api, me = servers.api, await servers.api.token("ada")
    spec = await good(transport := GrpcTransport(servers.channel, me["Authorization"]))
    ended = (await transport.submit(spec))[0].id
    await succeed(api, ended)
    running = (await transport.submit(spec))[0].id
    attempt = await admitted(api, running)
    await put_checkpoint(api, running, attempt, 1, {"a": b"123"})
    queued = (await transport.submit(spec))[0].id
    request = {"kind": "webhook", "name": "hook", "secrets": {"url": "https://hooks.example/x"}, "events": ["*"]}
    manager = await api.token("ada", "admin")
    channel = (await api.call("POST", "/v1/channels", manager, 201, json=request))["id"]
    message = write(JobSpec(), spec)
    known = {
        "job_id": [ended, running, queued],
        "spec": [message],
        "train": [message.train],
        "name": ["good-name", "words.csv"],
        "cap_usd": ["5.00", "1000000"],
        "path": ["a", message.train.data.path],
        "model": [message.train.model],
        "completion": ["{definition}"],
        "init_from": [f"job/{running}"],
        "data": [CSV.encode(), message.train.data],
    }
    return World(servers=servers, ended=ended, running=running, queued=queued, channel=channel, known=known)


async def succeed(api: Running, job: str) -> None:
    """Let the queued job succeed, with an attempt, a log and results, as the controllers would."""
    attempt = await admitted(api, job)
    await put_checkpoint(api, job, attempt, 5, {"adapter.safetensors": b"good"}, complete=True)
    await api.service.blobs.put(keys.log_chunk(attempt, 0, "boot", 0), b"hello\n")
    store = api.service.store
    row, live = await store.job(JobId(job)), (await store.live_attempts())[0].attempt
    assert row is not None
    ended = replace(live, state=AttemptState.ENDED, reason=Reason.COMPLETED, ended_at=SEEN)
    after = replace(row, state=JobState.SUCCEEDED, finished_at=SEEN)
    event = Event(job_id=row.id, kind="job.succeeded", message="done", data={"steps": 5})
    assert all(await store.apply([Change(attempt=(live, ended), job=(row, after), events=(event,))]))


@asynccontextmanager
async def database() -> AsyncIterator[str]:
    """Yield the dsn of a migrated database on a server of its own."""
    folder = Path(tempfile.mkdtemp(prefix="gb-"))  # short: a socket's path has at most 107 bytes
    try:
        async with await EmbeddedPostgres.start(folder, durable=False) as server:
            await migrate(server.dsn)
            yield server.dsn
    finally:
        shutil.rmtree(folder, ignore_errors=True)
