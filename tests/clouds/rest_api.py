"""Common part of Lambda's and Vast's emulators: JSON calls, each checked against the schema file in both directions."""

import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.clouds.faults import Faults
from tests.clouds.schema import Schema
from tests.clouds.state import CloudName, World


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Call that conforms to the schema."""

    query: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    path: Mapping[str, str] = field(default_factory=dict)


class Refusal(Exception):
    """Raised to answer a call with an error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


Act = Callable[[Ask], Awaitable[Any]]


class JsonApi(ABC):
    """Server of a cloud's calls by name; a subclass implements their behaviour."""

    def __init__(self, cloud: CloudName, world: World, faults: Faults) -> None:
        self.cloud: CloudName = cloud
        self.world, self.faults = world, faults
        self.schema = Schema(cloud)

    @property
    def calls(self) -> Collection[str]:
        """Return the names of the calls."""
        return self.schema.calls.keys()

    @abstractmethod
    def error(self, refusal: Refusal) -> web.Response:
        """Return an error in the cloud's own shape."""

    def handle(self, call: str, act: Act) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Return the handler of one call."""

        async def handler(request: web.Request) -> web.Response:
            async def carry_out() -> web.Response:
                try:
                    answer = await act(await self._ask(request, call))
                except Refusal as refusal:
                    return self.error(refusal)
                for problem in self.schema.answered(call, answer):
                    self.world.violate(self.cloud, problem)
                return web.Response(status=204) if answer is None else web.json_response(answer)

            if not self.authorised(request):
                return self.error(Refusal(401, "auth", "the key is wrong"))
            return await self.faults.around(request, self.cloud, call, carry_out)

        return handler

    def authorised(self, request: web.Request) -> bool:
        return request.headers.get("Authorization") == f"Bearer {self.world.api_key}"

    async def unknown(self, request: web.Request) -> web.Response:
        """Record and refuse a call of a path that is not in the schema."""
        self.world.violate(self.cloud, f"no such call: {request.method} {request.path}")
        return self.error(Refusal(404, "not-found", "there is no such call"))

    async def _ask(self, request: web.Request, call: str) -> Ask:
        text = await request.text()
        try:
            body = json.loads(text) if text else None
        except ValueError:
            body = text
        query = {name: _value(text) for name, text in request.query.items() if name != "api_key"}
        problems = self.schema.asked(call, query=query, body=body)
        for problem in problems:
            self.world.violate(self.cloud, problem)
        if problems:
            raise Refusal(400, "invalid-parameters", "; ".join(problems))
        return Ask(query=query, body=body, path=dict(request.match_info))


def _value(text: str) -> Any:
    """Return a query value parsed as JSON, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
