"""A cloud's API that returns the answers of a test and records the calls."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Answer = Callable[[Any, Mapping[str, str]], Any]


@dataclass
class Api:
    """Emulated API. `routes`: by `METHOD /path`, a function of (body, query); a web.Response is sent unchanged."""

    routes: dict[str, Answer] = field(default_factory=dict)
    asked: list[tuple[str, Any, str]] = field(default_factory=list)
    """(`METHOD /path`, body, Authorization) of each call."""
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        call = f"{request.method} {request.path}"
        body = await request.json() if request.can_read_body else None
        self.asked.append((call, body, request.headers.get("Authorization", "")))
        if call not in self.routes:
            return web.json_response({"error": f"no {call}"}, status=404)
        answer = self.routes[call](body, request.query)
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)


@asynccontextmanager
async def serving() -> AsyncIterator[Api]:
    api = Api()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.handle)
    async with TestServer(app) as server:
        api.url = f"http://{server.host}:{server.port}"
        yield api
