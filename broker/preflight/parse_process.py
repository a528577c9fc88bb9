"""Parses an uploaded file in a process of its own, with limits on memory, CPU time, wall time and the result's size."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from broker.billing.invoice_formats import Format
from broker.billing.reconcile import Invoice, InvoiceLine
from broker.domain.errors import InvalidInput, Problem
from broker.preflight.parse_worker import INVOICE, MEMORY_BYTES, OUT_OF_MEMORY, examine, examine_invoice, is_gzip
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


@dataclass(frozen=True, kw_only=True)
class _Refusals:
    """Field and fixes of the errors about one kind of file."""

    field: str
    on_memory: str
    on_time: str
    on_size: str

    def error(self, message: str) -> InvalidInput:
        return InvalidInput(Problem(field=self.field, message=message))

    def slow(self, cpu_s: int) -> InvalidInput:
        return self.error(f"reading it takes more than {cpu_s} s; {self.on_time}")

    def of_exit(self, code: int, cpu_s: int) -> InvalidInput:
        """Return the error for the exit code of a worker."""
        if -code in (24, 9):  # SIGXCPU, then SIGKILL; the kernel also sends SIGKILL if memory runs out
            divide = "reading it takes too much memory or time; divide the file"
            return self.slow(cpu_s) if -code == 24 else self.error(divide)
        if code == OUT_OF_MEMORY or -code == 6:  # SIGABRT: an allocation of native code failed
            return self.error(f"reading it takes more than {MEMORY_BYTES >> 20} MiB of memory; {self.on_memory}")
        return self.error("it cannot be read; write it again")


DATA = _Refusals(
    field="train.data", on_memory="use smaller row groups", on_size="keep the columns to train on",
    on_time="give fewer rows or columns, or less compressed data",
)  # fmt: skip
BILL = _Refusals(
    field="invoice", on_memory="divide the invoice by days", on_time="divide the invoice by days",
    on_size="divide the invoice by days",
)  # fmt: skip


async def parse(data: Path, fmt: DataFormat) -> Mapping[str, Any] | None:
    """Return the summary of an uploaded file; None for a .tar of code. Raises InvalidInput.

    The process ends when this call is cancelled, for example because the client hung up.
    """
    size = data.stat().st_size
    if fmt in TEXTS and size <= SMALL_BYTES:
        return await asyncio.to_thread(examine, data, fmt)
    return await _examined(data, fmt, DATA)


async def parse_invoice(data: Path, fmt: Format) -> Invoice:
    """Return the invoice in an uploaded file, with one line for each machine and day. Raises InvalidInput.

    The process ends when this call is cancelled.
    """
    if data.stat().st_size <= SMALL_BYTES and not await asyncio.to_thread(is_gzip, data):
        document: Mapping[str, Any] | None = await asyncio.to_thread(examine_invoice, data, fmt)
    else:
        document = await _examined(data, INVOICE + fmt, BILL)
    assert document is not None
    return await asyncio.to_thread(_invoice, document)


def _invoice(document: Mapping[str, Any]) -> Invoice:
    lines = tuple(
        InvoiceLine(
            machine=machine,
            usd=Decimal(usd),
            since=None if since is None else datetime.fromisoformat(since),
            until=None if until is None else datetime.fromisoformat(until),
        )
        for machine, usd, since, until in document["lines"]
    )
    return Invoice(cloud=document["cloud"], lines=lines, by_machine=document["by_machine"], ignored=document["ignored"])


async def _examined(data: Path, fmt: str, refusals: _Refusals) -> Mapping[str, Any] | None:
    """Return the worker's summary of a file. Raises InvalidInput."""
    cpu_s = CPU_S + data.stat().st_size // BYTES_PER_CPU_S
    code, output = await _output(data, fmt, cpu_s, refusals)
    if code:
        raise refusals.of_exit(code, cpu_s)
    document = json.loads(output)
    if "problems" in document:
        raise InvalidInput(*(Problem(**problem) for problem in document["problems"]))
    summary: Mapping[str, Any] | None = document["summary"]
    return summary


async def _output(data: Path, fmt: str, cpu_s: int, refusals: _Refusals) -> tuple[int, bytes]:
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
                    raise refusals.error(f"its summary has more than {MAX_RESULT} bytes; {refusals.on_size}")
            return await worker.wait(), bytes(output)
    except TimeoutError:
        raise refusals.slow(cpu_s) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
        await asyncio.shield(worker.wait())
