"""Emulates Slack's side of Socket Mode: tickets, envelopes, and repeats without an acknowledgement."""

import asyncio
import itertools
import json
from typing import Any

from aiohttp import WSMsgType, web

REFRESH = {"type": "disconnect", "reason": "refresh_requested", "debug_info": {"host": "loopback"}}


class Sockets:
    """WebSockets of an app. `retry_s`: seconds without an acknowledgement before an envelope is sent again."""

    def __init__(self, retry_s: float = 60.0) -> None:
        self.retry_s = retry_s
        self.open: list[web.WebSocketResponse] = []
        self.opened = 0
        self.acked: dict[str, dict[str, Any]] = {}
        self.sent: list[str] = []
        """Ids of sent envelopes, including repeats."""
        self._changed = asyncio.Condition()
        self._tickets = (f"t{n}" for n in itertools.count(1))
        self._valid: set[str] = set()
        self._envelopes = itertools.count(1)

    def ticket(self) -> str:
        """Return a ticket with which the app may open one connection."""
        name = next(self._tickets)
        self._valid.add(name)
        return name

    async def link(self, request: web.Request) -> web.StreamResponse:
        """Serve one connection of the app."""
        ticket = request.query.get("ticket", "")
        if ticket not in self._valid:
            raise web.HTTPForbidden
        self._valid.discard(ticket)
        socket = web.WebSocketResponse(autoping=True)
        await socket.prepare(request)
        await socket.send_json({"type": "hello", "num_connections": len(self.open) + 1, "connection_info": {}})
        self.open.append(socket)
        self.opened += 1
        await self._notify()
        try:
            async for message in socket:
                if message.type is WSMsgType.TEXT:
                    ack = json.loads(message.data)
                    self.acked[ack["envelope_id"]] = ack
                    await self._notify()
        finally:
            self.open.remove(socket)
            await self._notify()
        return socket

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, check: Any, within_s: float = 300.0) -> None:
        """Wait until `check()` is true. Raises TimeoutError."""
        async with asyncio.timeout(within_s), self._changed:
            await self._changed.wait_for(check)

    async def deliver(self, kind: str, payload: dict[str, Any], *, tries: int = 3) -> dict[str, Any]:
        """Send an envelope until it is acknowledged; return the acknowledgement."""
        name = f"e{next(self._envelopes)}"
        await self.until(lambda: self.open)
        for attempt in range(tries):
            self.sent.append(name)
            envelope = {"type": kind, "envelope_id": name, "payload": payload, "accepts_response_payload": True}
            if attempt:
                envelope |= {"retry_attempt": attempt, "retry_reason": "timeout"}
            await self.open[-1].send_json(envelope)
            try:
                await self.until(lambda: name in self.acked, self.retry_s)
            except TimeoutError:
                continue
            return self.acked[name]
        raise AssertionError(f"no acknowledgement of {name}")

    async def repeat(self, name: str, kind: str, payload: dict[str, Any]) -> None:
        """Send an acknowledged envelope again, as after a lost acknowledgement."""
        self.acked.pop(name, None)
        await self.open[-1].send_json({"type": kind, "envelope_id": name, "payload": payload})
        await self.until(lambda: name in self.acked)

    async def refresh(self) -> None:
        """Request a new connection of the app, as Slack does every few hours."""
        await self.open[-1].send_json(REFRESH)

    async def close(self) -> None:
        for socket in list(self.open):
            await socket.close()
