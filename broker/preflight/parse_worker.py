"""Process that parses one uploaded file: `python -m broker.preflight.parse_worker <path> <format> <CPU seconds>`.

The format is that of a data set, or `invoice:` and the cloud of an invoice.

A file of a stranger can need any amount of memory and time, so the daemon never parses it itself. The process limits
itself before it opens the file. It writes one JSON document to standard output; `parse_process` starts it.
"""

import contextlib
import json
import lzma
import resource
import sys
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from broker.billing.invoice_formats import GZIP, Format, read_invoice
from broker.domain.errors import InvalidInput, Problem
from broker.preflight.dataset import summarise
from trainer.contract.data_config import DataFormat

MEMORY_BYTES = 768 << 20
"""Address space of the process in bytes."""
INVOICE = "invoice:"
"""Start of the formats of invoices."""
OUT_OF_MEMORY, OUT_OF_TIME = 70, 71
"""Exit codes. The kernel ends a process over its limits by a signal instead."""


def examine(data: Path, fmt: DataFormat) -> Mapping[str, Any] | None:
    """Return the summary of a data set with its format; None for a .tar of code. Raises InvalidInput.

    A .tar with pictures or tables to train on counts as a data set.
    """
    if fmt == "tar" and not _is_tar(data):
        raise InvalidInput(Problem(field="body", message="is not a tar archive; pack the folder with tar -cf"))
    try:
        return {**summarise(data, fmt).model_dump(mode="json"), "format": fmt}
    except InvalidInput:
        if fmt == "tar":
            return None
        raise


def examine_invoice(data: Path, fmt: Format) -> Mapping[str, Any]:
    """Return a condensed invoice as JSON, which `broker.preflight.parse_process` reads. Raises InvalidInput."""
    invoice = read_invoice(data.read_bytes(), fmt).condensed()
    lines = [
        (line.machine, str(line.usd), *(time and time.isoformat() for time in (line.since, line.until)))
        for line in invoice.lines
    ]
    return {"cloud": invoice.cloud, "by_machine": invoice.by_machine, "ignored": invoice.ignored, "lines": lines}


def is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(GZIP)) == GZIP


def _is_tar(path: Path) -> bool:
    try:
        return tarfile.is_tarfile(path)
    except (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError):  # a compressed archive that was cut off
        return False


def _examine(path: Path, fmt: str) -> Mapping[str, Any] | None:
    if fmt.startswith(INVOICE):
        return examine_invoice(path, cast(Format, fmt.removeprefix(INVOICE)))
    return examine(path, cast(DataFormat, fmt))


def _limit(cpu_s: int) -> None:
    with contextlib.suppress(OSError):  # the kernel ends this process before the daemon when memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def main(path: str, fmt: str, cpu_s: str) -> int:
    """Write `{"summary": …}` or `{"problems": […]}`, and return the exit code."""
    _limit(int(cpu_s))
    try:
        document: dict[str, Any] = {"summary": _examine(Path(path), fmt)}
    except InvalidInput as e:
        document = {"problems": [{"field": p.field, "message": p.message[:2000]} for p in e.problems]}
    except MemoryError:
        return OUT_OF_MEMORY
    sys.stdout.write(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
