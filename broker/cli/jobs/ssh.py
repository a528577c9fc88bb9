"""`gpubroker ssh` and `gpubroker exec`: run programs on a job's machine, through the daemon."""

import asyncio
import contextlib
import json
import os
import signal
import stat
import sys
import termios
import tty
from collections.abc import Iterator
from typing import Annotated

import aiohttp
import typer

from broker.cli.core.command import JobArgument, client, command
from broker.cli.core.exit_codes import BadInput
from broker.cli.core.job_lookup import job_id

CHUNK = 65536
OUT, ERR = 1, 2
"""First byte of a message: the stream that it belongs to; see `broker.api.http.terminal`."""
Words = Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="Program and arguments, after `--`.")]


@command
async def ssh(job: JobArgument) -> None:
    """Open a shell on a job's machine while training runs. Exits with the shell's exit code."""
    if not sys.stdin.isatty():
        raise BadInput("ssh needs a terminal; for scripts: gpubroker exec JOB -- COMMAND")
    await _run(job, [], terminal=True)


@command
async def execute(
    job: JobArgument,
    words: Words,
    terminal: Annotated[bool, typer.Option("--tty", "-t", help="Allocate a terminal for the program.")] = False,
) -> None:
    """Run a program on a job's machine while training runs: `gpubroker exec JOB -- nvidia-smi`."""
    if terminal and not sys.stdin.isatty():
        raise BadInput("--tty: stdin is not a terminal; omit --tty")
    await _run(job, words, terminal=terminal)


async def _run(job: str, words: list[str], *, terminal: bool) -> None:
    """Run a remote program. Raises typer.Exit with its exit code."""
    async with client() as c:
        full_id = await job_id(c, job)
        async with c.shell(full_id, words, tty=terminal) as socket:
            with _raw() if terminal else contextlib.nullcontext():
                code = await _relay(socket, terminal=terminal)
    raise typer.Exit(code)


async def _relay(socket: aiohttp.ClientWebSocketResponse, *, terminal: bool) -> int:
    feed = asyncio.create_task(_feed(socket, terminal=terminal))
    try:
        async for message in socket:
            if message.type is aiohttp.WSMsgType.BINARY:
                stream = sys.stderr if message.data[:1] == bytes([ERR]) else sys.stdout
                stream.buffer.write(message.data[1:])
                stream.buffer.flush()
            elif message.type is aiohttp.WSMsgType.TEXT:
                code = int(json.loads(message.data)["exit"])
                return 128 - code if code < 0 else code
    finally:
        feed.cancel()
        await asyncio.gather(feed, return_exceptions=True)
    raise aiohttp.ClientConnectionError("the connection was lost before the program ended")


async def _feed(socket: aiohttp.ClientWebSocketResponse, *, terminal: bool) -> None:
    """Send local input, and the size of the local terminal."""
    loop = asyncio.get_running_loop()
    if terminal:
        await _send_size(socket)
        loop.add_signal_handler(signal.SIGWINCH, lambda: loop.create_task(_send_size(socket)))
    mode = os.fstat(sys.stdin.fileno()).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or sys.stdin.isatty()):  # a file or /dev/null never blocks
        await socket.send_bytes(await asyncio.to_thread(sys.stdin.buffer.read))
        await socket.send_str(json.dumps({"eof": True}))
        return
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while data := await reader.read(CHUNK):
        await socket.send_bytes(data)
    await socket.send_str(json.dumps({"eof": True}))


async def _send_size(socket: aiohttp.ClientWebSocketResponse) -> None:
    size = os.get_terminal_size()
    await socket.send_str(json.dumps({"resize": [size.lines, size.columns]}))


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Send every key to the remote program, including Ctrl-C."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setraw(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
