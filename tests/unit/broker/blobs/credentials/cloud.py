"""Token service of a cloud on loopback: returns the configured answers and records the requests."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web


@dataclass(kw_only=True)
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def form(self) -> dict[str, str]:
        return dict(parse_qsl(self.body.decode(), strict_parsing=True))


@dataclass(kw_only=True)
class Cloud:
    url: str = ""
    asked: list[Asked] = field(default_factory=list)


@asynccontextmanager
async def serving(answer: Callable[[Asked], tuple[int, Any]]) -> AsyncIterator[Cloud]:
    """`answer`: status and body (text, or what becomes JSON) of a request."""
    cloud = Cloud()

    async def handle(request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        one = Asked(method=request.method, path=request.path_qs, headers=headers, body=await request.read())
        cloud.asked.append(one)
        status, body = answer(one)
        return web.Response(status=status, text=body if isinstance(body, str) else json.dumps(body))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    try:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        cloud.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield cloud
    finally:
        await runner.cleanup()
