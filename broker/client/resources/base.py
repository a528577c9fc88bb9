"""What every group of calls is built on."""

from typing import Any, TypeVar

from pydantic import BaseModel

from broker.client.transport.http import Transport

Answer = TypeVar("Answer", bound=BaseModel)


class Calls:
    """Typed calls over one transport; `Client` joins the groups."""

    _http: Transport

    async def _call(self, method: str, path: str, answer: type[Answer], **request: Any) -> Answer:
        return answer.model_validate_json(await self._http.read(method, path, **request))
