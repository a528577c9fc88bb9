"""Daemon with a cloud that refuses every call, and with more connections than it answers at once."""

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from broker.api.app import REQUESTS
from broker.api.core.request_slots import REQUESTS_OF_TEAM
from tests.crash.daemon_rig import DaemonRig
from tests.crash.services import open_services
from tests.crash.supervised_daemon import SETTLE_S, SupervisedDaemon
from tests.crash.waits import Within

CALLERS = 2 * REQUESTS
PAUSE_S = 300
"""Seconds of Retry-After that the refusing cloud sends."""


class Refusing:
    """Cloud that answers every call with 429."""

    def __init__(self) -> None:
        self.asked = Counter[str]()
        self.url = ""

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked[request.path] += 1
        return web.json_response({}, status=429, headers={"Retry-After": str(PAUSE_S)})

    @asynccontextmanager
    async def serves(self) -> AsyncIterator["Refusing"]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


async def test_refusing_cloud_slows_no_other_and_excess_callers_must_retry() -> None:
    async with open_services() as services, Refusing().serves() as busy, DaemonRig(services) as rig:
        rig.daemon.orders["busy"] = busy.url
        rig.daemon.start()
        await rig.daemon.serves()
        jobs = [await rig.submit() for _ in range(3)]
        answers = await crowd(rig.daemon)
        assert set(answers) - {(503, "2")} == {(200, None), (429, "5")}  # 503: all places of the daemon are taken
        assert answers[200, None] >= REQUESTS_OF_TEAM
        verdict = await rig.settle()
        assert (verdict.broken, len(rig.acknowledged)) == ([], len(jobs))
        # Each kind of call is made once, and once more for calls in flight at the first refusal: not at every poll.
        assert set(busy.asked) >= {"/cloud/list", "/cloud/offers"}
        assert max(busy.asked.values()) <= 2, busy.asked


async def crowd(daemon: SupervisedDaemon) -> Counter[tuple[int, str | None]]:
    """Return (status, Retry-After) of many requests that reach the daemon at the same moment."""
    document = json.loads((daemon.home / "client.json").read_text())
    host, port = document["url"].removeprefix("http://").split(":")
    headers = f"Host: {host}\r\nAuthorization: Bearer {document['token']}\r\nConnection: close"
    asks = f"GET /v1/jobs HTTP/1.1\r\n{headers}\r\n\r\n"
    streams = [await asyncio.open_connection(host, int(port)) for _ in range(CALLERS)]
    daemon.signal(signal.SIGSTOP)
    try:
        for _, writer in streams:
            writer.write(asks.encode())
            await writer.drain()
    finally:
        daemon.signal(signal.SIGCONT)
    async with Within(SETTLE_S, f"{CALLERS} callers are answered", daemon.status_message):
        answers = await asyncio.gather(*(reader.read() for reader, _ in streams))
    for _, writer in streams:
        writer.close()
    return Counter(map(_told, answers))


def _told(answer: bytes) -> tuple[int, str | None]:
    head = answer.split(b"\r\n\r\n", 1)[0].decode().split("\r\n")
    named = dict(line.split(": ", 1) for line in head[1:])
    return int(head[0].split()[1]), named.get("Retry-After")
