"""Token service of a cloud on loopback: returns the configured answers and records the requests."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web


@dataclass(kw_only=True)
class TokenRequest:
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
class TokenService:
    url: str = ""
    requests: list[TokenRequest] = field(default_factory=list)


@asynccontextmanager
async def serving(answer: Callable[[TokenRequest], tuple[int, Any]]) -> AsyncIterator[TokenService]:
    """Yield a token service. `answer`: status and body of its answers; a body that is not text becomes JSON."""
    service = TokenService()

    async def handle(request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        received = TokenRequest(method=request.method, path=request.path_qs, headers=headers, body=await request.read())
        service.requests.append(received)
        status, body = answer(received)
        return web.Response(status=status, text=body if isinstance(body, str) else json.dumps(body))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    try:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield service
    finally:
        await runner.cleanup()
