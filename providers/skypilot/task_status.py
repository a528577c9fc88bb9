"""Status of the task on a launched machine, read over SSH from the files that `plugin/start.sh` writes.

SkyPilot's launch returns before `setup` and `run` start, so their result must be read from the machine.
"""

import asyncio
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import BinaryIO

from providers.skypilot.errors import one_line
from providers.skypilot.plugin.ssh import changed_key_message

READ_S = 30.0
"""Timeout of one status read in seconds."""
MAX_ANSWER_BYTES = 256 * 1024
"""Largest number of bytes read from an answer, because an untrusted host could send data without end."""
MAX_ERROR_BYTES = 4096
"""Largest number of bytes read from the error output of ssh."""
SETTLED_S = 60.0
"""Seconds of running after which a task counts as started. A trainer that cannot run at all fails earlier."""
_SHELL = "sh -s"
_STATUS_LINE = re.compile(rb"([A-Z_]+) (-?\d+)")
"""First line of an answer: the status and the seconds since `run` began."""
_FAILED = frozenset({"FAILED", "FAILED_SETUP"})
_ENDED = re.compile(r"gpubroker-run: the trainer ended with (\d+)")
_TRAINER_EXIT_CODES = frozenset({0, 64, 65, 70, 71, 75})
"""Exit codes of a trainer that ran, as in machine/run.sh. The trainer's final.json contains the result."""
_SCRIPT_PREFIXES = ("gpubroker-setup: ", "gpubroker-run: ")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[a-zA-Z]")


@dataclass(frozen=True, kw_only=True)
class SkyJob:
    """State of the task on one machine."""

    status: str
    """SETTING_UP, RUNNING, SUCCEEDED, FAILED or FAILED_SETUP."""
    ran_s: float
    """Seconds since `run` began, by the machine's clock; 0 before."""
    log: str
    """End of the task's output."""


class HostKeyChanged(Exception):
    """Raised when a machine shows another SSH host key than the pinned one."""


async def read_job(ssh: Sequence[str]) -> SkyJob | None:
    """Return the state of the machine's task, or None if the machine does not answer. Raises HostKeyChanged.

    `ssh`: argv of ssh with the machine's address; a command for the machine's shell is appended as one word.
    A separate pipe carries the answer, because with asyncio's PIPE `wait` hangs once the reader is full and paused.
    """
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as answers, tempfile.TemporaryFile() as errors:
        try:
            process = await asyncio.create_subprocess_exec(
                *ssh, _SHELL, stdin=asyncio.subprocess.PIPE, stdout=writing, stderr=errors
            )
        finally:
            os.close(writing)
        try:
            async with asyncio.timeout(READ_S):
                head, _, log = (await _read_answer(process, answers)).partition(b"\n")
        except (TimeoutError, ConnectionError):
            return None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        errors.seek(0)
        output = errors.read(MAX_ERROR_BYTES).decode("utf-8", "replace")
        if process.returncode and (changed := changed_key_message(ssh[-1], output)):
            raise HostKeyChanged(changed)
    status_line = _STATUS_LINE.fullmatch(head)
    if status_line is None:
        return None
    return SkyJob(
        status=status_line[1].decode(), ran_s=max(0.0, float(status_line[2])), log=log.decode("utf-8", "replace")
    )


async def _read_answer(process: asyncio.subprocess.Process, answers: BinaryIO) -> bytes:
    """Send `look.sh` to the machine's shell and return its output, cut soon after `MAX_ANSWER_BYTES` bytes."""
    assert process.stdin is not None
    process.stdin.write(_script())
    process.stdin.close()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, answers)
    answer = b""
    try:
        while len(answer) <= MAX_ANSWER_BYTES and (chunk := await reader.read(MAX_ANSWER_BYTES)):
            answer += chunk
    finally:
        transport.close()
    return answer


def start_result(job: SkyJob, secrets: Sequence[str] | None) -> bool | str:
    """Return True once the task has started, False before, and the cause as a sentence if it failed.

    See `providers.common.cloud.Launcher.started`. `secrets`: words of account and task to hide. None: the task's
    secrets are unknown, so the cause quotes only lines of the broker's own scripts.
    """
    lines = _task_lines(job.log)
    exit_code = next((int(match[1]) for line in reversed(lines) if (match := _ENDED.match(line))), None)
    if job.status in _FAILED or (exit_code is not None and exit_code not in _TRAINER_EXIT_CODES):
        return _failure_message(job.status, lines, secrets)
    has_ended = job.status == "SUCCEEDED" or exit_code is not None
    return has_ended or (job.status == "RUNNING" and job.ran_s >= SETTLED_S)


def _failure_message(status: str, lines: Sequence[str], secrets: Sequence[str] | None) -> str:
    """Return the cause from the last line of the broker's scripts and the last line of the program that they called."""
    script_lines = [line for line in lines if line.startswith(_SCRIPT_PREFIXES)]
    program_lines = [line for line in lines if not line.startswith(_SCRIPT_PREFIXES)]
    if not script_lines:
        cause = f"the machine's task ended as {status}"
    elif ended := _ENDED.match(script_lines[-1]):
        cause = f"the trainer cannot run on this machine (exit code {ended[1]}); check trainer.image"
    else:
        cause = script_lines[-1].partition(": ")[2]
    if program_lines and secrets is not None:
        cause = f"{cause} (output: {program_lines[-1]})"
    return one_line(cause, secrets or ())


def _task_lines(log: str) -> list[str]:
    lines = _COLOUR.sub("", log).replace("\r", "\n").split("\n")
    return [stripped for line in lines if (stripped := line.strip())]


def _script() -> bytes:
    return Path(str(files("providers") / "machine" / "look.sh")).read_bytes()
