"""Parses an uploaded file in a process of its own, with limits on memory, CPU time, wall time and the result's size."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from broker.domain.errors import InvalidInput, Problem
from broker.preflight.parse_worker import MEMORY_BYTES, OUT_OF_MEMORY, examine
from broker.runtime.child_process import start_child
from trainer.contract.data_config import DataFormat

CPU_S, BYTES_PER_CPU_S = 10, 500_000
"""CPU seconds for any file, and the bytes of the file for each further second."""
WALL_S = 60.0
"""Seconds beyond the CPU time, for a machine with other work."""
MAX_RESULT = 8 << 20
"""Maximum bytes of a summary."""
SMALL_BYTES = 64 << 10
"""Largest text in bytes that is parsed in a thread, because its size bounds the work."""
TEXTS = ("csv", "json", "jsonl")


async def parse(data: Path, fmt: DataFormat) -> Mapping[str, Any] | None:
    """Return the summary of an uploaded file; None for a .tar of code. Raises InvalidInput.

    The process ends when this call is cancelled, for example because the client hung up.
    """
    size = data.stat().st_size
    if fmt in TEXTS and size <= SMALL_BYTES:
        return await asyncio.to_thread(examine, data, fmt)
    cpu_s = CPU_S + size // BYTES_PER_CPU_S
    code, output = await _output(data, fmt, cpu_s)
    if code:
        raise _refusal(code, cpu_s)
    document = json.loads(output)
    if "problems" in document:
        raise InvalidInput(*(Problem(**problem) for problem in document["problems"]))
    summary: Mapping[str, Any] | None = document["summary"]
    return summary


async def _output(data: Path, fmt: DataFormat, cpu_s: int) -> tuple[int, bytes]:
    """Run the worker and return its exit code and its output. Raises InvalidInput for too large an output."""
    worker = await start_child(
        (sys.executable, "-P", "-m", "broker.preflight.parse_worker", str(data), fmt, str(cpu_s)),
        stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert worker.stdout is not None
    output = bytearray()
    try:
        async with asyncio.timeout(cpu_s + WALL_S):
            while piece := await worker.stdout.read(1 << 16):
                output += piece
                if len(output) > MAX_RESULT:
                    raise _invalid(f"its summary has more than {MAX_RESULT} bytes; keep the columns to train on")
            return await worker.wait(), bytes(output)
    except TimeoutError:
        raise _slow(cpu_s) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
        await asyncio.shield(worker.wait())


def _refusal(code: int, cpu_s: int) -> InvalidInput:
    if -code in (24, 9):  # SIGXCPU, then SIGKILL; the kernel also sends SIGKILL if memory runs out
        return _slow(cpu_s) if -code == 24 else _invalid("reading it takes too much memory or time; divide the file")
    if code == OUT_OF_MEMORY or -code == 6:  # SIGABRT: an allocation of native code failed
        return _invalid(f"reading it takes more than {MEMORY_BYTES >> 20} MiB of memory; use smaller row groups")
    return _invalid("it cannot be read; write it again")


def _slow(cpu_s: int) -> InvalidInput:
    return _invalid(f"reading it takes more than {cpu_s} s; give fewer rows or columns, or less compressed data")


def _invalid(message: str) -> InvalidInput:
    return InvalidInput(Problem(field="train.data", message=message))
