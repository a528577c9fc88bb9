"""A webhook's receiver on loopback, and a notifier that posts there."""

import base64
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from broker.domain.job import Event
from broker.domain.notifications import Channel, Delivery, JobSnapshot
from broker.notify.webhook.notifier import WebhookNotifier
from broker.runtime.secret_box import SecretBox
from tests.conformance.samples import START, ManualClock, make_attempt, make_job

BOX = SecretBox(bytes(range(32)))
JOB = make_job()
EVENT = Event(job_id=JOB.id, kind="attempt.preempted", message="gone ü", seq=7, at=START, data={"step": 3})
DELIVERY = Delivery(stream=JOB.id, event=EVENT, folded=2)
SNAPSHOT = JobSnapshot(job=JOB, attempts=(make_attempt(JOB),))


class Names(AbstractResolver):
    """A DNS that answers each question for `host` with the next of its lists, and the last one from then on."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers = {name.replace("_", "."): lists for name, lists in answers.items()}
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_INET) -> list[ResolveResult]:
        self.asked.append(host)
        lists = self.answers[host]
        found = lists.pop(0) if len(lists) > 1 else lists[0]
        return [
            ResolveResult(
                hostname=host, host=one, port=port, family=socket.AF_INET6 if ":" in one else socket.AF_INET, proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for one in found
        ]  # fmt: skip

    async def close(self) -> None:
        """Do nothing: the notifier holds no resources."""


@dataclass
class Receiver:
    """HTTP receiver that records requests and answers them with `answer`."""

    answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    port: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.got.append((dict(request.headers), await request.read()))
        return await self.answer(request)


def always(status: int, **headers: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, headers={name.replace("_", "-"): text for name, text in headers.items()})

    return answer


@asynccontextmanager
async def receiving(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]], *, host: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None, port: int = 0,
) -> AsyncIterator[Receiver]:  # fmt: skip
    receiver = Receiver(answer=answer)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", receiver.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, host, port, ssl_context=tls).start()
    receiver.port = runner.addresses[0][1]
    try:
        yield receiver
    finally:
        await runner.cleanup()


@dataclass
class Rig:
    clock: ManualClock
    make: Callable[..., WebhookNotifier]
    notifier: WebhookNotifier

    def channel(self, url: str, **secrets: str) -> Channel:
        known = {"url": url, "signing": "whsec_" + base64.b64encode(b"k" * 32).decode(), **secrets}
        return Channel(
            id="c", kind="webhook", name="hook", team="default", sealed=BOX.seal(json.dumps(known)), created_at=START
        )

    async def send(self, url: str, *, delivery: Delivery = DELIVERY, secrets: Mapping[str, str] | None = None) -> None:
        snapshot = SNAPSHOT if delivery.event else None
        await self.notifier.deliver(self.channel(url, **(secrets or {})), delivery, snapshot, None)
