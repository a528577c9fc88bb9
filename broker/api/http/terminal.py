"""Runs a program of this host behind a WebSocket, with a terminal or with plain pipes.

A binary frame from the client is input. A binary frame to the client is one byte that names the stream (1 output,
2 errors), then the bytes. Text frames are JSON: `{"resize": [rows, columns]}` or `{"eof": true}` from the client, and
`{"exit": code}` to the client as the last frame.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import termios
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import WSMsgType, web

OUT, ERR = b"\x01", b"\x02"
CHUNK = 65536
ORDER_CHARACTERS = 1000
"""Longest text message that is parsed: the event loop parses it."""
HANG_UP_S = 5.0
"""Seconds from SIGHUP to SIGKILL for a program that does not end."""


async def serve(argv: Sequence[str], socket: web.WebSocketResponse, *, tty: bool) -> None:
    """Run the program until it ends. If the client disconnects first, send SIGHUP to the program."""
    session = await (_Terminal.start(argv) if tty else _Pipes.start(argv))
    pump = asyncio.create_task(session.pump(socket.send_bytes))
    listen = asyncio.create_task(_listen(socket, session))
    try:
        await asyncio.wait((pump, listen), return_when=asyncio.FIRST_COMPLETED)
        if pump.done() and not socket.closed:
            await socket.send_str(json.dumps({"exit": await session.process.wait()}))
    finally:
        for task in (pump, listen):
            task.cancel()
        await asyncio.gather(pump, listen, return_exceptions=True)
        await session.end()


async def _listen(socket: web.WebSocketResponse, session: "_Session") -> None:
    async for message in socket:
        if message.type is WSMsgType.BINARY:
            await session.write(message.data)
        elif message.type is WSMsgType.TEXT:
            if len(message.data) > ORDER_CHARACTERS:
                continue
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error):
                order = json.loads(message.data)
                if order.get("eof"):
                    session.eof()
                elif "resize" in order:
                    session.resize(*order["resize"])


class _Session(ABC):
    """One running program, in a process session of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @abstractmethod
    async def pump(self, send: Callable[[bytes], Any]) -> None:
        """Send frames with the program's output until the program ends."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write input to the program."""

    @abstractmethod
    def eof(self) -> None:
        """Close the program's input."""

    @abstractmethod
    def resize(self, rows: int, columns: int) -> None:
        """Resize the window, if there is a terminal."""

    async def end(self) -> None:
        """Send SIGHUP, then kill the program if it does not end."""
        for number in (signal.SIGHUP, signal.SIGKILL):
            if self.process.returncode is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HANG_UP_S):
                    await self.process.wait()


class _Pipes(_Session):
    @classmethod
    async def start(cls, argv: Sequence[str]) -> "_Pipes":
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        return cls(process)

    async def pump(self, send: Callable[[bytes], Any]) -> None:
        async def drain(stream: asyncio.StreamReader | None, mark: bytes) -> None:
            while stream is not None and (data := await stream.read(CHUNK)):
                await send(mark + data)

        await asyncio.gather(drain(self.process.stdout, OUT), drain(self.process.stderr, ERR))
        await self.process.wait()

    async def write(self, data: bytes) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.process.stdin.write(data)
                await self.process.stdin.drain()

    def eof(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()

    def resize(self, rows: int, columns: int) -> None:
        """Do nothing: pipes have no size."""


class _Terminal(_Session):
    def __init__(self, process: asyncio.subprocess.Process, master: int) -> None:
        super().__init__(process)
        self._master = master

    @classmethod
    async def start(cls, argv: Sequence[str]) -> "_Terminal":
        master, slave = pty.openpty()
        os.set_blocking(master, False)
        try:
            # `setsid --ctty` makes this the program's controlling terminal, so that Ctrl-C and job control work.
            process = await asyncio.create_subprocess_exec(
                "setsid", "--ctty", "--wait", *argv, stdin=slave, stdout=slave, stderr=slave, process_group=0
            )
        except OSError:
            os.close(master)
            raise
        finally:
            os.close(slave)
        return cls(process, master)

    async def pump(self, send: Callable[[bytes], Any]) -> None:
        while data := await self._read_output():
            await send(OUT + data)
        await self.process.wait()

    async def _read_output(self) -> bytes:
        """Return output; empty once every process has closed the terminal."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._master, readable.set)
        try:
            await readable.wait()
            return os.read(self._master, CHUNK)
        except OSError:
            return b""
        finally:
            loop.remove_reader(self._master)

    async def write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._master, data) :]
            except BlockingIOError:
                await asyncio.sleep(0.01)
            except OSError:
                return

    def eof(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._master, b"\x04")

    def resize(self, rows: int, columns: int) -> None:
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    async def end(self) -> None:
        os.close(self._master)
        await super().end()
