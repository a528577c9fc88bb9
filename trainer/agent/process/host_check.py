"""Check of this machine's disk and of its GPUs' error records before the worker starts. Does not import torch."""

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
import shutil
import time
from pathlib import Path

from trainer.agent.base.prepare import UnusableInput
from trainer.contract.documents import Outcome

BLOCK = 4 << 20
"""Bytes that are written and read back."""
LIMIT_S = 10.0
"""Longest time in seconds for the disk test, and for the answer of nvidia-smi."""
REAP_S = 1.0
"""Longest wait in seconds for the end of a killed nvidia-smi, because a hung driver can keep the process for ever."""
XID = re.compile(r"NVRM: Xid \((?P<where>[^)]*)\): (?P<number>\d+)")
FATAL = {
    48: "a double-bit memory error",
    64: "a faulty memory row could not be remapped",
    74: "an NVLink error",
    79: "it has fallen off the bus",
    92: "too many single-bit memory errors",
    95: "an uncontained memory error",
    119: "its firmware does not answer",
}
"""NVIDIA Xid errors (docs.nvidia.com/deploy/xid-errors) after which a GPU cannot be trusted."""


class HostNotUsable(UnusableInput):
    """This machine is unfit; another machine may be fit."""

    def __init__(self, message: str) -> None:
        super().__init__(Outcome.INFRASTRUCTURE, f"host: {message}")


async def check(folder: Path, *, gpus: int) -> str:
    """Check the machine and return a line that lists the checks. Raises: HostNotUsable."""
    speed = await asyncio.to_thread(disk, folder)
    words = [f"disk at {speed / 1e6:.0f} MB/s"]
    if gpus:
        if problem := xid(await asyncio.to_thread(kernel_log)):
            raise HostNotUsable(problem)
        if problem := uncorrected(await _ecc()):
            raise HostNotUsable(problem)
        words.append("no GPU errors recorded")
    return f"host: {', '.join(words)}"


def disk(folder: Path) -> float:
    """Write, sync and read back a small file; return the speed in bytes/s. Raises: HostNotUsable."""
    path, data = folder / f".host-{secrets.token_hex(4)}", os.urandom(BLOCK)
    started = time.monotonic()
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        same = hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(data).digest()
    except OSError as e:
        raise HostNotUsable(f"its disk cannot store {BLOCK >> 20} MiB: {e.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    took = time.monotonic() - started
    if not same:
        raise HostNotUsable("its disk returned bytes other than those written")
    if took > LIMIT_S:
        raise HostNotUsable(f"its disk took {took:.0f} s to write and read {BLOCK >> 20} MiB")
    return BLOCK / took


def kernel_log() -> str:
    """Return the kernel's messages, as far as this user may read them; empty without permission."""
    log = b""
    with contextlib.suppress(OSError):
        messages = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            while piece := os.read(messages, 8192):
                log += piece
        finally:
            os.close(messages)
    return log.decode(errors="replace")


def xid(log: str) -> str:
    """Return a message about the first fatal Xid error in the kernel log; empty if there is none."""
    for match in XID.finditer(log):
        if why := FATAL.get(int(match["number"])):
            return f"the GPU at {match['where']} had Xid {match['number']}: {why}"
    return ""


def uncorrected(counts: str) -> str:
    """Return a message about the first GPU with uncorrected memory errors; empty if there is none.

    `counts`: the number of errors since driver start, one line per GPU.
    """
    for number, line in enumerate(counts.splitlines()):
        if line.strip().isdigit() and int(line) > 0:
            return f"GPU {number} had {line.strip()} memory errors that were not corrected"
    return ""


async def _ecc() -> str:
    """Return the error counts that `uncorrected` takes; empty if nvidia-smi is absent or does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    query = "--query-gpu=ecc.errors.uncorrected.volatile.total"
    try:
        process = await asyncio.create_subprocess_exec(
            tool, query, "--format=csv,noheader", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:
        return ""
    try:
        async with asyncio.timeout(LIMIT_S):
            out, _ = await process.communicate()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            process.kill()
            async with asyncio.timeout(REAP_S):
                await process.wait()
        return ""
    return out.decode(errors="replace")
