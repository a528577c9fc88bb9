"""grpc.health.v1: SERVING follows the same readiness as /readyz, evaluated at each check."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc as stubs

from broker.api.core.problems import NotFound
from broker.api.core.readiness import Readiness, unready

SERVING, NOT_SERVING = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING
POLL_S = 5.0


class HealthServicer(stubs.HealthServicer):  # type: ignore[misc]  # the package has no types
    """Health of the server. `services`: names that clients may ask for, besides the empty one; all share one status."""

    def __init__(self, readiness: Readiness, services: frozenset[str]) -> None:
        self._readiness = readiness
        self._known = services | {""}

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in self._known:
            raise NotFound("no such service here")
        return pb.HealthCheckResponse(status=await self._status())

    async def List(self, request: Any, context: Any) -> Any:
        answer = pb.HealthCheckResponse(status=await self._status())
        return pb.HealthListResponse(statuses=dict.fromkeys(self._known, answer))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Send each change of the status.

        For an unknown service, the protocol requires SERVICE_UNKNOWN instead of an error.
        """
        if request.service not in self._known:
            yield pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVICE_UNKNOWN)
            await asyncio.Event().wait()
        sent = None
        while True:
            status = await self._status()
            if status != sent:
                yield pb.HealthCheckResponse(status=status)
                sent = status
            await asyncio.sleep(POLL_S)

    async def _status(self) -> Any:
        return NOT_SERVING if unready(await self._readiness.check()) else SERVING
