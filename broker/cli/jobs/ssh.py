"""Commands on the machine of a job: ssh and exec, through the daemon."""

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
"""First byte of what comes back: see `broker.api.http.terminal`."""
Words = Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="Program and arguments, after `--`.")]


@command
async def ssh(job: JobArgument) -> None:
    """Open a shell on a job's machine, beside the trainer. Its exit code is the shell's."""
    if not sys.stdin.isatty():
        raise BadInput("ssh needs a terminal; for scripts: gpubroker exec JOB -- COMMAND")
    await _run(job, [], terminal=True)


@command
async def execute(
    job: JobArgument,
    words: Words,
    terminal: Annotated[bool, typer.Option("--tty", "-t", help="Give the program a terminal.")] = False,
) -> None:
    """Run a program on a job's machine, beside the trainer: `gpubroker exec JOB -- nvidia-smi`."""
    if terminal and not sys.stdin.isatty():
        raise BadInput("--tty needs a terminal here too; leave it out")
    await _run(job, words, terminal=terminal)


async def _run(job: str, words: list[str], *, terminal: bool) -> None:
    """Raises typer.Exit with the program's exit code."""
    async with client() as c:
        wanted = await job_id(c, job)
        async with c.shell(wanted, words, tty=terminal) as socket:
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
    raise aiohttp.ClientConnectionError("the connection was cut before the program's end")


async def _feed(socket: aiohttp.ClientWebSocketResponse, *, terminal: bool) -> None:
    """Our input, and the size of our window."""
    loop = asyncio.get_running_loop()
    if terminal:
        await _tell_size(socket)
        loop.add_signal_handler(signal.SIGWINCH, lambda: loop.create_task(_tell_size(socket)))
    mode = os.fstat(sys.stdin.fileno()).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or sys.stdin.isatty()):  # a file or /dev/null: it never waits
        await socket.send_bytes(await asyncio.to_thread(sys.stdin.buffer.read))
        await socket.send_str(json.dumps({"eof": True}))
        return
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while data := await reader.read(CHUNK):
        await socket.send_bytes(data)
    await socket.send_str(json.dumps({"eof": True}))


async def _tell_size(socket: aiohttp.ClientWebSocketResponse) -> None:
    size = os.get_terminal_size()
    await socket.send_str(json.dumps({"resize": [size.lines, size.columns]}))


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Every key goes to the other side, Ctrl-C too."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setraw(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
