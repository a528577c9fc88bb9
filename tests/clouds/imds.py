"""The instance metadata service of one machine, version 2 only, over sockets that the machine's forwarder hands out.

Source: the EC2 user guide, "Use the Instance Metadata Service to access instance metadata" and "Spot Instance
interruption notices". Machines are launched with HttpTokens=required, so a request without a token is refused.
"""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Mapping

TOKEN_PATH = "/latest/api/token"
TOKEN = "x-aws-ec2-metadata-token"
TTL = "x-aws-ec2-metadata-token-ttl-seconds"
INSTANCE_ACTION = "/latest/meta-data/spot/instance-action"
REQUEST_S = 60.0
LIMIT = 16384


class Imds:
    """Emulated metadata service that answers from the current `contents` (text by path)."""

    def __init__(self, contents: Mapping[str, str]) -> None:
        self.contents = contents
        self._tokens: dict[str, float] = {}

    async def serve(self, sock: socket.socket) -> None:
        """Serve one connection with one request."""
        reader, writer = await asyncio.open_connection(sock=sock, limit=LIMIT)
        with contextlib.suppress(ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(REQUEST_S):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status, body = self._answer(head[0], dict(self._headers(head[1:])))
            payload = body.encode()
            writer.write(f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nConnection: close\r\n".encode())
            writer.write(f"Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
            await writer.drain()
        writer.close()

    @staticmethod
    def _headers(lines: list[str]) -> list[tuple[str, str]]:
        pairs = [line.partition(":") for line in lines if line]
        return [(name.strip().lower(), value.strip()) for name, _, value in pairs]

    def _answer(self, request: str, headers: Mapping[str, str]) -> tuple[str, str]:
        method, _, rest = request.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        now = asyncio.get_running_loop().time()
        if method == "PUT" and path == TOKEN_PATH:
            ttl = headers.get(TTL, "")
            if not ttl.isdigit() or not 1 <= int(ttl) <= 21600:
                return "400 Bad Request", ""
            token = secrets.token_urlsafe(24)
            self._tokens[token] = now + int(ttl)
            return "200 OK", token
        if self._tokens.get(headers.get(TOKEN, ""), 0.0) <= now:
            return "401 Unauthorized", ""
        if method != "GET":
            return "405 Method Not Allowed", ""
        found = self.contents.get(path.rstrip("/") or "/")
        if found is not None:
            return "200 OK", found
        below = sorted(
            {self._next_part(path, name) for name in self.contents if name.startswith(path.rstrip("/") + "/")}
        )
        return ("200 OK", "\n".join(below)) if below else ("404 Not Found", "")

    @staticmethod
    def _next_part(path: str, name: str) -> str:
        part, slash, _ = name.removeprefix(path.rstrip("/") + "/").partition("/")
        return part + slash
