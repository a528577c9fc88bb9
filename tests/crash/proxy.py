"""Proxies between a daemon and the world: PostgreSQL by its wire protocol, the cloud and the blob store by HTTP."""

import asyncio
import contextlib
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from yarl import URL

from broker.domain.job import AttemptState, JobState
from broker.store.postgres.pool import QUERIES
from tests.crash.gate import Gate

# ---------------------------------------------------------------------------------------------------------- PostgreSQL

NAMES = {sql: name for name, sql in QUERIES.items()}
LOCKS = re.compile(r"FOR (NO KEY )?UPDATE")
WRITES = re.compile(r"\b(INSERT INTO|UPDATE|DELETE FROM|pg_notify)\b")
APPLY = frozenset(
    {"write_jobs", "write_attempts", "admit_attempts", "write_charges", "write_prices", "write_ledger", "write_events"}
)
STATES = tuple(dict.fromkeys(state.value for kind in (AttemptState, JobState) for state in kind))
IN_TRANSACTION, IDLE = ord("T"), ord("I")


def _name(sql: str) -> str:
    return NAMES.get(sql) or " ".join(sql.split()[:3]).lower()


def _writes(sql: str) -> bool:
    return WRITES.search(LOCKS.sub("", sql)) is not None


def _states(parameters: bytes) -> set[str]:
    """Return the states in an array of texts with length prefixes."""
    return {state for state in STATES if struct.pack(">i", len(state)) + state.encode() in parameters}


@dataclass
class _Wire:
    """State of one connection, derived from its messages."""

    client: asyncio.StreamReader
    to_client: asyncio.StreamWriter
    server: asyncio.StreamReader
    to_server: asyncio.StreamWriter
    gate: Gate
    statements: dict[bytes, str] = field(default_factory=dict)
    status: int = IDLE
    """Status of the transaction in the server's last answer."""
    written: dict[str, set[str]] = field(default_factory=dict)
    """Statements of the current transaction, each with the states that it writes."""
    awaited: tuple[str, int] | None = None
    """Passage whose answer has not arrived; None: none."""

    async def forward(self) -> None:
        """Forward the client's messages, until the gate breaks the connection off or one side closes it."""
        await self._pass_first()
        while True:
            head = await self.client.readexactly(5)
            body = await self.client.readexactly(struct.unpack(">i", head[1:])[0] - 4)
            name = self._passage(head[0], body)
            if name is not None:
                name = self.gate.called(name)
                number = self.gate.number(name)
                if not await self.gate.passes_async(name, number, "before"):
                    return
                self.awaited = name, number
            self.to_server.write(head + body)
            if not self._more_comes():
                await self.to_server.drain()

    def _more_comes(self) -> bool:
        return bool(getattr(self.client, "_buffer", b""))

    async def _pass_first(self) -> None:
        """Forward the first message, which has no kind."""
        size = await self.client.readexactly(4)
        self.to_server.write(size + await self.client.readexactly(struct.unpack(">i", size)[0] - 4))

    def _passage(self, kind: int, body: bytes) -> str | None:
        """Return the name of the passage if this message must pass the gate."""
        if kind == ord("P"):
            name, sql, _ = body.split(b"\0", 2)
            self.statements[name] = sql.decode()
        elif kind == ord("B"):
            _, name, parameters = body.split(b"\0", 2)
            return self._bound(self.statements.get(name, ""), parameters)
        elif kind == ord("Q"):
            return self._said(body[:-1].decode())
        return None

    def _bound(self, sql: str, parameters: bytes) -> str | None:
        if not _writes(sql):
            return None
        if self.status == IDLE:
            return f"commit:{_name(sql)}"
        self.written.setdefault(_name(sql), set()).update(_states(parameters))
        return None

    def _said(self, sql: str) -> str | None:
        word = sql.split(maxsplit=1)[0].strip(";").upper() if sql.strip() else ""
        if word in ("BEGIN", "ROLLBACK"):
            self.written = {}
            return None
        if word != "COMMIT":
            return f"commit:{_name(sql)}" if _writes(sql) else None
        written, self.written = self.written, {}
        return f"commit:{_called(written)}" if written else None

    async def answer(self) -> None:
        """Forward the server's messages; an awaited answer is held back until it is complete."""
        held = bytearray()
        while True:
            head = await self.server.readexactly(5)
            body = await self.server.readexactly(struct.unpack(">i", head[1:])[0] - 4)
            held += head + body
            if head[0] == ord("Z"):
                self.status = body[0]
                awaited, self.awaited = self.awaited, None
                if awaited is not None and not await self.gate.passes_async(*awaited, "after"):
                    return
            elif self.awaited is not None:
                continue
            self.to_client.write(bytes(held))
            held.clear()
            await self.to_client.drain()


def _called(written: dict[str, set[str]]) -> str:
    states = sorted(set().union(*written.values()))
    names = set(written) - {"notify", "enter"}
    if names and names <= APPLY:
        what = "charge" if "write_charges" in names else "apply"
        return f"{what}({','.join(states)})"
    return "+".join(sorted(names)) or "notify"


class PostgresProxy:
    """Proxy on loopback between one daemon and a PostgreSQL server at a unix socket."""

    def __init__(self, gate: Gate, socket: Callable[[], str]) -> None:
        self._gate, self._socket = gate, socket
        self._listener: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self.cut()
        await asyncio.gather(*self._open, return_exceptions=True)

    def cut(self) -> None:
        """Cut every connection at once."""
        for task in self._open:
            task.cancel()

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        writers = [to_client]
        try:
            server, to_server = await asyncio.open_unix_connection(self._socket())
            writers.append(to_server)
            await _either(_Wire(client, to_client, server, to_server, self._gate))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(task)
            for writer in writers:
                writer.transport.abort()


async def _either(wire: _Wire) -> None:
    """Forward messages until one of the two directions ends."""
    sides = [asyncio.ensure_future(wire.forward()), asyncio.ensure_future(wire.answer())]
    try:
        await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for side in sides:
            side.cancel()
        for outcome in await asyncio.gather(*sides, return_exceptions=True):
            gone = (OSError, asyncio.IncompleteReadError, asyncio.CancelledError)
            if isinstance(outcome, BaseException) and not isinstance(outcome, gone):
                raise outcome


# ---------------------------------------------------------------------------------------------------------------- HTTP

HOP = {"host", "connection", "transfer-encoding", "content-length", "content-encoding", "date", "server"}
CLOUD = "/cloud/"
READS = ("GET", "HEAD")


class HttpProxy:
    """Proxy on loopback for one daemon: paths below /cloud/ go to the cloud, all others to the blob store.

    `turn`: lock that serialises calls of the blob store, because moto is not thread-safe and its put-if-absent has two
    steps.
    """

    def __init__(self, gate: Gate, cloud: str, blobs: str, turn: asyncio.Lock) -> None:
        self._gate, self._cloud, self._blobs, self._turn = gate, cloud, blobs, turn
        self._client: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        self._client = aiohttp.ClientSession(auto_decompress=False)
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._client is not None:
            await self._client.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        name = self._gate.called(_call(request))
        number = self._gate.number(name)
        body = await request.read()
        if await self._gate.passes_async(name, number, "before"):
            with contextlib.suppress(aiohttp.ClientError):
                answer = await self._forward(request, body)
                if answer is not None and await self._gate.passes_async(name, number, "after"):
                    return answer
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=499)  # aiohttp requires a response; the caller has no connection left to read it

    async def _forward(self, request: web.Request, body: bytes) -> web.Response | None:
        """Return the answer, or None for a read whose caller has disconnected while it waited for the blob store.

        Such reads are skipped, because they would delay the repeated calls until these are abandoned as well.
        """
        assert self._client is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
        async with contextlib.AsyncExitStack() as turn:
            upstream = self._cloud if request.path.startswith(CLOUD) else self._blobs
            if upstream is self._blobs:
                await turn.enter_async_context(self._turn)
                if request.method in READS and request.transport is None:
                    return None
            target = URL(upstream + request.raw_path, encoded=True)
            asked = self._client.request(request.method, target, data=body, headers=headers)
            return await _copied(await turn.enter_async_context(asked), request.method)


async def _copied(answer: aiohttp.ClientResponse, method: str) -> web.Response:
    kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP}
    data = await answer.read()
    if method == "HEAD":
        kept["Content-Length"] = answer.headers.get("Content-Length", "0")
    return web.Response(status=answer.status, body=data, headers=kept)


def _call(request: web.Request) -> str:
    if request.path.startswith(CLOUD):
        return f"cloud:{request.path.removeprefix(CLOUD)}"
    key = request.query.get("prefix", "") if "list-type" in request.query else request.path
    verb = "list" if "list-type" in request.query else request.method.lower()
    verb = "copy" if "x-amz-copy-source" in request.headers else "delete" if "delete" in request.query else verb
    return f"blob:{verb} {_kind(key.strip('/').split('/'))}"


def _kind(parts: list[str]) -> str:
    """Return an object's kind: the name of its document, or otherwise its folder."""
    last = parts[-1]
    if "." in last and "data" not in parts:
        return last
    named = [
        part for part in parts if part in ("uploads", "data", "heartbeats", "log", "checkpoints", "attempts", "broker")
    ]
    return named[-1] if named else "objects"
