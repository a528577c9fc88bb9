"""Forwarding of bytes between host and machines on a separate thread, so that a busy test does not stop it."""

import array
import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
CHUNK = 1 << 16
PACKET = 1 << 20


class Switchboard:
    """Separate thread with an event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="switchboard", daemon=True)
        self._thread.start()

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the switchboard's loop and wait for its result on the caller's loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    async def close(self) -> None:
        async def cancel() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        await self.call(cancel())
        self.loop.call_soon_threadsafe(self.loop.stop)
        await asyncio.to_thread(self._thread.join)
        self.loop.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, OSError):
        while chunk := await reader.read(CHUNK):
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
        return
    writer.transport.abort()


async def splice(one: socket.socket, other: socket.socket) -> None:
    """Copy both ways until both ends have closed."""
    one_reader, one_writer = await asyncio.open_connection(sock=one)
    other_reader, other_writer = await asyncio.open_connection(sock=other)
    try:
        await asyncio.gather(_copy(one_reader, other_writer), _copy(other_reader, one_writer))
    finally:
        for writer in (one_writer, other_writer):
            writer.close()


class Link:
    """Host's side of a machine's control socket; root/init.py lists the messages."""

    def __init__(
        self, control: socket.socket, arrived: Callable[[Mapping[str, Any], socket.socket | None], None]
    ) -> None:
        """Connect. `arrived` receives every message that answers no request, on the switchboard's loop."""
        self._control = control
        self._control.setblocking(False)
        self._arrived = arrived
        self._waiting: dict[int, asyncio.Future[tuple[Mapping[str, Any], socket.socket | None]]] = {}
        self._next = 0
        self._loop = asyncio.get_running_loop()
        self.closed = asyncio.Event()
        self._loop.add_reader(control.fileno(), self._readable)

    async def send(self, message: Mapping[str, Any], sock: socket.socket | None = None) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [sock.fileno()]))] if sock else []
        while True:
            try:
                self._control.sendmsg([json.dumps(message).encode()], rights)
                return
            except BlockingIOError:
                await asyncio.sleep(0.01)

    async def connect(self, port: int) -> socket.socket:
        """Return a connection to 127.0.0.1:`port` in the machine. Raises ConnectionError."""
        answer, sock = await self._ask("connect", {"port": port}, None)
        if sock is None:
            raise ConnectionError(answer.get("error", "no connection"))
        return sock

    async def execute(self, argv: Sequence[str], env: Mapping[str, str]) -> tuple[int, str]:
        """Run `argv` in the machine as root; return the exit status and the output. Raises ConnectionError."""
        ours, theirs = socket.socketpair()
        asked = asyncio.ensure_future(self._ask("exec", {"argv": list(argv), "env": dict(env)}, theirs))
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            writer.write_eof()
            output = await reader.read()
            answer, _ = await asked
        finally:
            writer.close()
        return answer["code"], output.decode(errors="replace") + answer.get("error", "")

    async def _ask(
        self, kind: str, what: Mapping[str, Any], sock: socket.socket | None
    ) -> tuple[Mapping[str, Any], socket.socket | None]:
        """Send a request together with the file descriptor of `sock`, and return the answer."""
        if self.closed.is_set():
            raise ConnectionError("the machine is dead")
        self._next += 1
        number = self._next
        self._waiting[number] = self._loop.create_future()
        try:
            try:
                await self.send({kind: number, **what}, sock)
            finally:
                if sock is not None:
                    sock.close()
            return await self._waiting[number]
        finally:
            del self._waiting[number]

    def _readable(self) -> None:
        try:
            data, rights, _, _ = self._control.recvmsg(PACKET, socket.CMSG_SPACE(4))
        except BlockingIOError:
            return
        except OSError:
            data, rights = b"", []
        if not data:
            return self.close()
        sock = self._received(rights)
        message = json.loads(data)
        waiting = self._waiting.get(message.get("connect") or message.get("exec") or 0)
        if waiting is not None and not waiting.done():
            waiting.set_result((message, sock))
        else:
            self._arrived(message, sock)

    @staticmethod
    def _received(rights: Sequence[tuple[int, int, bytes]]) -> socket.socket | None:
        fds = array.array("i")
        for _, _, packed in rights:
            fds.frombytes(packed[:4])
        return socket.socket(fileno=fds[0]) if fds else None

    async def drain(self) -> None:
        """Read the last output of the dead machine."""
        while not self.closed.is_set():
            self._readable()
            await asyncio.sleep(0)

    def close(self) -> None:
        if self.closed.is_set():
            return
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionError("the machine died"))
        self.closed.set()
