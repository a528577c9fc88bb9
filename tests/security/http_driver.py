"""Driver of HTTP, which derives the calls from the OpenAPI document."""

from typing import Any

from tests.security.drivers import ServerFault
from tests.security.http_asks import HttpAsk, http_asks
from tests.security.world import World, read

SHOWN_HEADERS = ("Content-Type", "Location", "Idempotent-Replay", "Retry-After", "Allow", "ETag", "WWW-Authenticate")


class HttpDriver:
    name = "http"

    def asks(self, world: World) -> list[HttpAsk]:
        return http_asks(world)

    async def answer(self, world: World, ask: HttpAsk) -> str:
        url = world.api.url + ask.path
        options: dict[str, Any] = {"json": ask.json} if ask.json is not None else {"data": ask.data}
        async with world.api.http.request(
            ask.method, url, params=list(ask.query), headers=ask.headers, **options
        ) as response:
            if response.status == 500:
                raise ServerFault(await response.text())
            head = [f"{name}: {response.headers[name]}" for name in SHOWN_HEADERS if name in response.headers]
            return "\n".join([str(response.status), *head, "", await read(response)])
