"""Runs a PostgreSQL program as a child process of an ordinary user that ends with this process."""

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
# The server's answers to connections while it starts; they do not explain why it ended.
_CHATTER = re.compile(r'FATAL:  (the database system is|(database|role) "\w+" does not exist)')


class PostgresChild:
    """A running PostgreSQL program. Its stderr is a file, because the program may outlive this process."""

    def __init__(self, process: asyncio.subprocess.Process, output: Path, offset: int) -> None:
        self.process = process
        self._output = output
        self._offset = offset

    @classmethod
    async def spawn(cls, binary: Path, folder: Path, output: Path, *arguments: str) -> PostgresChild:
        """Start `binary` as an ordinary user that owns `folder`, in its own session.

        The program ends with this process. Its stderr is appended to `output`.
        """
        if output.exists() and output.stat().st_size > OUTPUT_BYTES:
            output.rename(output.with_suffix(".log.1"))
        with output.open("ab") as stderr:
            offset = stderr.tell()  # read now, because the child shares the position and moves it
            starting = asyncio.create_task(
                asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-I", "-S", str(_EXEC), str(os.getpid()), str(folder), str(binary)),
                    *arguments,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=stderr,
                    start_new_session=True,  # so that Ctrl-C in a terminal signals the daemon only
                    cwd="/",
                )
            )
            try:
                process = await asyncio.shield(starting)
            except asyncio.CancelledError:  # some event loops leave the child running here
                process = await starting
                await cls(process, output, offset).stop()
                raise
            return cls(process, output, offset)

    async def wait(self) -> str:
        """Reap the program and return in one line why it ended."""
        code = await self.process.wait()
        if code < 0:
            return f"killed by signal {-code}"
        with self._output.open("rb") as file:
            file.seek(self._offset)
            output = file.read(OUTPUT_BYTES).decode("utf-8", "replace").splitlines()
        lines = [line.strip() for line in output if not _CHATTER.match(line)]
        fatal = [n for n, line in enumerate(lines) if re.match(r"(FATAL|PANIC|initdb: error):", line)]
        return "; ".join(lines[fatal[-1] :][:5] if fatal else lines[-3:]) or f"exit status {code}"

    async def stop(self) -> None:
        """End and reap the program: by SIGINT (fast shutdown), SIGQUIT (immediate shutdown), then SIGKILL."""
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):  # wait_for of Python 3.11 may swallow a cancellation
                    await self.process.wait()
                return
