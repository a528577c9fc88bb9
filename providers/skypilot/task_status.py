"""How the task of a launched machine fares: SkyPilot's launch has returned by then, and `setup` and `run` follow.

Read over SSH from what `machine/start.sh` writes down.
"""

import asyncio
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import BinaryIO

from providers.skypilot.errors import one_line

LOOK_S = 30.0
"""One look takes no longer."""
MOST = 256 * 1024
"""Bytes of an answer that are read: a host may send what it likes, for as long as it is listened to."""
SETTLED_S = 60.0
"""A trainer that cannot run at all (`docker run` is refused) has ended by then."""
_SHELL = "sh -s"
_SAYS = re.compile(rb"([A-Z_]+) (-?\d+)")
"""First line of an answer."""
_FAILED = frozenset({"FAILED", "FAILED_SETUP"})
_ENDED = re.compile(r"gpubroker-run: the trainer ended with (\d+)")
_TELLS = frozenset({0, 64, 65, 70, 71, 75})
"""Exit codes of a trainer that ran, as in machine/run.sh: how it went is in its final.json."""
_OURS = ("gpubroker-setup: ", "gpubroker-run: ")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[a-zA-Z]")


@dataclass(frozen=True, kw_only=True)
class SkyJob:
    status: str
    """SETTING_UP, RUNNING, SUCCEEDED, FAILED, FAILED_SETUP."""
    ran_s: float
    """Since `run` began, by the machine's clock; 0 before."""
    log: str
    """The end of what it prints."""


async def look(ssh: Sequence[str]) -> SkyJob | None:
    """`ssh`: argv to which a word for the machine's shell may be appended. None: nothing can be learned just now.

    The pipe of the answer is our own: asyncio's PIPE holds `wait` up for ever once its reader is paused, full.
    """
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as answers:
        try:
            process = await asyncio.create_subprocess_exec(
                *ssh, _SHELL, stdin=asyncio.subprocess.PIPE, stdout=writing, stderr=asyncio.subprocess.DEVNULL
            )
        finally:
            os.close(writing)
        try:
            async with asyncio.timeout(LOOK_S):
                head, _, log = (await _ask(process, answers)).partition(b"\n")
        except (TimeoutError, ConnectionError):
            return None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
    says = _SAYS.fullmatch(head)
    if says is None:
        return None
    return SkyJob(status=says[1].decode(), ran_s=max(0.0, float(says[2])), log=log.decode("utf-8", "replace"))


async def _ask(process: asyncio.subprocess.Process, answers: BinaryIO) -> bytes:
    """Hands over our script; the first `MOST` bytes of what is answered, and a little more."""
    assert process.stdin is not None
    process.stdin.write(_script())
    process.stdin.close()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, answers)
    said = b""
    try:
        while len(said) <= MOST and (more := await reader.read(MOST)):
            said += more
    finally:
        transport.close()
    return said


def verdict(job: SkyJob, secrets: Sequence[str] | None) -> bool | str:
    """See `providers.common.cloud.Launcher.started`. `secrets`: of account and task; None: the task's are unknown,
    and only what our own scripts say is told on.
    """
    lines = _task_lines(job.log)
    ended = next((int(found[1]) for line in reversed(lines) if (found := _ENDED.match(line))), None)
    if job.status in _FAILED or (ended is not None and ended not in _TELLS):
        return _cause(job.status, lines, secrets)
    return job.status == "SUCCEEDED" or ended is not None or (job.status == "RUNNING" and job.ran_s >= SETTLED_S)


def _cause(status: str, lines: Sequence[str], secrets: Sequence[str] | None) -> str:
    """What our scripts said last, and what the program said that they had called."""
    ours = [line for line in lines if line.startswith(_OURS)]
    theirs = [line for line in lines if not line.startswith(_OURS)]
    if not ours:
        cause = f"the machine's task ended as {status}"
    elif ended := _ENDED.match(ours[-1]):
        cause = f"the trainer cannot run on this machine (exit code {ended[1]}); check trainer.image"
    else:
        cause = ours[-1].partition(": ")[2]
    if theirs and secrets is not None:
        cause = f"{cause} (it said: {theirs[-1]})"
    return one_line(cause, secrets or ())


def _task_lines(log: str) -> list[str]:
    lines = _COLOUR.sub("", log).replace("\r", "\n").split("\n")
    return [line for one in lines if (line := one.strip())]


def _script() -> bytes:
    return Path(str(files("providers") / "machine" / "look.sh")).read_bytes()
