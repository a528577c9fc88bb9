"""Runs a PostgreSQL program as a child: an ordinary user's, tied to this process's life, reaped, its words kept."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
from collections import deque
from pathlib import Path

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 20.0
DRAIN_S = 0.5
LINE_BYTES = 8192

_EXEC = Path(__file__).with_name("_pg_exec.py")
# What the server answers to our own early connections; of no use in explaining its end.
_CHATTER = re.compile(r'FATAL:  (the database system is|database "\w+" does not exist)')


class Output(asyncio.Protocol):
    """What a program says on its stderr: logged, the last lines kept.

    A pipe of our own, because asyncio's `process.wait()` waits for the end of pipes it made, and backends that outlive
    their postmaster hold this one open."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=20)
        self._partial = b""
        self._ended = asyncio.Event()
        self._transport: asyncio.BaseTransport | None = None

    @classmethod
    async def open(cls) -> tuple[Output, int]:
        """The reading side, and the descriptor to write to, which the caller closes."""
        reading, writing = os.pipe()
        _, output = await asyncio.get_running_loop().connect_read_pipe(cls, os.fdopen(reading, "rb"))
        return output, writing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *whole, self._partial = (self._partial + data).split(b"\n")
        self._partial = self._partial[:LINE_BYTES]
        for line in whole:
            text = line.decode("utf-8", "replace").strip()
            if not _CHATTER.match(text):
                self.lines.append(text)
                log.debug("postgres: %s", text)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()

    async def drain(self) -> None:
        """Take what is left once the program has ended; a moment, as others may hold the pipe open."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), DRAIN_S)
        self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Child:
    """A running PostgreSQL program, and its end."""

    def __init__(self, process: asyncio.subprocess.Process, output: Output) -> None:
        self.process = process
        self._output = output

    @classmethod
    async def spawn(cls, binary: Path, folder: Path, *arguments: str) -> Child:
        """Start `binary` as an ordinary user that owns `folder`, in its own session, tied to this process's life."""
        output, stderr = await Output.open()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", str(_EXEC), str(os.getpid()), str(folder), str(binary)),
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,  # a terminal's Ctrl-C is the daemon's to handle
                cwd="/",
            )
        except BaseException:
            output.close()
            raise
        finally:
            os.close(stderr)
        return cls(process, output)

    async def wait(self) -> str:
        """Reap it and say in one line why it ended."""
        code = await self.process.wait()
        await self._output.drain()
        if code < 0:
            return f"killed by signal {-code}"
        lines = list(self._output.lines)
        fatal = [n for n, line in enumerate(lines) if re.match(r"(FATAL|PANIC|initdb: error):", line)]
        return "; ".join(lines[fatal[-1] :] if fatal else lines[-3:]) or f"exit status {code}"

    async def stop(self) -> None:
        """Fast shutdown (SIGINT), then immediate (SIGQUIT), then SIGKILL; reaped when this returns."""
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), STOP_TIMEOUT_S)
                return
