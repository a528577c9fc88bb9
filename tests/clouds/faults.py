"""Failures between a caller and a cloud, which tests arm for the next calls."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from aiohttp import web

from tests.clouds.limits import RateLimits
from tests.clouds.state import Call, CloudName, World

Trouble = Literal["status", "drop", "hang"]


@dataclass(kw_only=True)
class Fault:
    """Fault of a call. `status`: HTTP status of the answer. `drop`: break the connection. `hang`: wait until released.

    `done`: the call has its effect nevertheless.
    """

    cloud: CloudName
    call: str = "*"
    """Name of the call in the schema file; `*`: any call."""
    trouble: Trouble = "status"
    status: int = 500
    retry_after_s: int | None = None
    done: bool = False
    times: int = 1


class Faults:
    """Armed faults, in order. Each strikes `times` calls."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._armed: list[Fault] = []
        self._released = asyncio.Event()
        self.limits = RateLimits()

    def arm(self, fault: Fault) -> None:
        self._armed.append(fault)

    def disarm(self) -> None:
        """Remove all armed faults, and fail the calls that hang."""
        self._armed.clear()
        self._released.set()
        self._released = asyncio.Event()

    def _take(self, cloud: CloudName, call: str) -> Fault | None:
        for fault in self._armed:
            if fault.cloud == cloud and fault.call in {"*", call}:
                fault.times -= 1
                if fault.times <= 0:
                    self._armed.remove(fault)
                return fault
        return None

    async def around(
        self, request: web.Request, cloud: CloudName, call: str, act: Callable[[], Awaitable[web.Response]]
    ) -> web.Response:
        """Carry out a call, or the fault that is armed for it, and record the call."""
        fault = self._take(cloud, call)
        if fault is None and not self.limits.accepts(cloud, call, asyncio.get_running_loop().time()):
            self._world.calls.append(Call(at=self._world.now(), cloud=cloud, call=call, status=429))
            return web.Response(status=429, text=f"API requests too frequent endpoint {call}")
        answer = await act() if fault is None or fault.done else None
        status = fault.status if fault is not None and fault.trouble == "status" else 0
        if fault is None and answer is not None:
            status = answer.status
        self._world.calls.append(Call(at=self._world.now(), cloud=cloud, call=call, status=status))
        if fault is None and answer is not None:
            return answer
        if status:
            assert fault is not None
            headers = {} if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
            return web.Response(status=status, headers=headers, text="the emulator was told to fail")
        if fault is not None and fault.trouble == "hang":
            await self._released.wait()
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=499)  # aiohttp requires a response; the caller has no connection left to read it
