"""Runs a PostgreSQL program as a child: an ordinary user's, tied to this process's life, reaped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from pathlib import Path

STOP_TIMEOUT_S = 20.0
OUTPUT_BYTES = 1 << 20

_EXEC = Path(__file__).with_name("exec_postgres.py")
# What the server answers to our own early connections; of no use in explaining its end.
_CHATTER = re.compile(r'FATAL:  (the database system is|database "\w+" does not exist)')


class PostgresChild:
    """A running PostgreSQL program, and its end. What it says goes to a file, so that it can speak when we are gone."""

    def __init__(self, process: asyncio.subprocess.Process, output: Path, offset: int) -> None:
        self.process = process
        self._output = output
        self._offset = offset

    @classmethod
    async def spawn(cls, binary: Path, folder: Path, output: Path, *arguments: str) -> PostgresChild:
        """Start `binary` as an ordinary user that owns `folder`, in its own session; it ends with this process.

        Its stderr is appended to `output`.
        """
        if output.exists() and output.stat().st_size > OUTPUT_BYTES:
            output.rename(output.with_suffix(".log.1"))
        with output.open("ab") as stderr:
            offset = stderr.tell()  # before the child, which shares the position, writes
            starting = asyncio.create_task(
                asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-I", "-S", str(_EXEC), str(os.getpid()), str(folder), str(binary)),
                    *arguments,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=stderr,
                    start_new_session=True,  # a terminal's Ctrl-C is the daemon's to handle
                    cwd="/",
                )
            )
            try:
                process = await asyncio.shield(starting)
            except asyncio.CancelledError:  # event loops differ in what they leave behind here
                process = await starting
                await cls(process, output, offset).stop()
                raise
            return cls(process, output, offset)

    async def wait(self) -> str:
        """Reap it and say in one line why it ended."""
        code = await self.process.wait()
        if code < 0:
            return f"killed by signal {-code}"
        with self._output.open("rb") as file:
            file.seek(self._offset)
            said = file.read(OUTPUT_BYTES).decode("utf-8", "replace").splitlines()
        lines = [line.strip() for line in said if not _CHATTER.match(line)]
        fatal = [n for n, line in enumerate(lines) if re.match(r"(FATAL|PANIC|initdb: error):", line)]
        return "; ".join(lines[fatal[-1] :][:5] if fatal else lines[-3:]) or f"exit status {code}"

    async def stop(self) -> None:
        """Fast shutdown (SIGINT), then immediate (SIGQUIT), then SIGKILL; reaped when this returns."""
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):  # wait_for of Python 3.11 may swallow a cancellation
                    await self.process.wait()
                return
