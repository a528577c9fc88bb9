"""Limits on the parsing of uploaded files: memory, CPU time, columns, nesting, and the life of the process."""

import asyncio
import gzip
import io
import os
import zipfile
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import arro3.core
import arro3.io
import pytest

from broker.domain.errors import InvalidInput
from broker.preflight import parse_process
from broker.preflight.parse_process import SMALL_BYTES, parse, parse_invoice


def parquet(rows: int, cell: str) -> bytes:
    table = arro3.core.Table.from_pydict({"a": arro3.core.Array([cell] * rows, type=arro3.core.DataType.utf8())})
    buffer = io.BytesIO()
    arro3.io.write_parquet(table, buffer, compression="zstd(3)")
    return buffer.getvalue()


def zipped(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


def wide(rows: int) -> bytes:
    return b"".join(b'{"c%07d": 1}\n' % number for number in range(rows))


async def test_a_file_is_summarised_in_its_process_as_in_a_thread(tmp_path: Path) -> None:
    small, large, table = tmp_path / "small", tmp_path / "large", tmp_path / "table"
    small.write_bytes(b'{"a": "x"}\n' * 3)
    large.write_bytes(b'{"a": "x"}\n' * SMALL_BYTES)
    table.write_bytes(parquet(3, "x"))
    in_thread, in_process, columnar = [
        await parse(path, fmt) or {} for path, fmt in ((small, "jsonl"), (large, "jsonl"), (table, "parquet"))
    ]
    assert in_thread["rows"] == columnar["rows"] == 3
    assert in_process["rows"] == SMALL_BYTES
    assert in_thread["columns"]["a"]["percentiles"] == in_process["columns"]["a"]["percentiles"]
    assert columnar["columns"] == in_thread["columns"]


@pytest.mark.parametrize(
    ("content", "fmt", "words"),
    [
        (parquet(256, "x" * 3_000_000), "parquet", "MiB of memory"),
        (wide(100_000), "jsonl", "more than 2000 columns"),
        (b'{"' + b"n" * 2000 + b'": 1}\n', "jsonl", "has a name of 2000 characters"),
        (b"n" * 2000 + b"\n1\n", "csv", "has a name of 2000 characters"),
        (b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}\n", "jsonl", "nested in more than 64 levels"),
        (b'[{"a": ' + b"[" * 900 + b"]" * 900 + b"}]", "json", "nested in more than 64 levels"),
        (zipped("a.jsonl", b'{"a": "%s"}\n' % (b"x" * 30_000_000)), "zip", "pack less repetitive data"),
        (b"PAR1" + bytes(range(256)) * 400 + b"PAR1", "parquet", "not a Parquet file that can be read"),
    ],
    ids=["memory", "columns", "name", "csv name", "depth", "json depth", "ratio", "damaged"],
)  # fmt: skip
async def test_an_absurd_file_is_refused_in_one_line(tmp_path: Path, content: bytes, fmt: str, words: str) -> None:
    path = tmp_path / "upload"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=words) as refused:
        await parse(path, fmt)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


async def test_an_invoice_is_read_in_the_process_and_condensed(tmp_path: Path) -> None:
    path = tmp_path / "invoice"
    row = b"gpu_1x_a10,0.10,2026-01-01T05:00:00Z,2026-01-02\n"
    table = b"instance_type,usd,since,until\n" + row * 3
    path.write_bytes(table)
    small = await parse_invoice(path, "lambda")
    path.write_bytes(gzip.compress(table, mtime=0))
    invoice = await parse_invoice(path, "lambda")
    assert invoice == small
    start, end = datetime(2026, 1, 1, 5, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
    (line,) = invoice.lines
    assert (line.machine, line.usd, line.since, line.until) == ("gpu_1x_a10", Decimal("0.30"), start, end)
    assert (invoice.cloud, invoice.by_machine) == ("lambda", False)


async def test_an_absurd_invoice_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "invoice"
    for content, words in (
        (b"\xff", "is not UTF-8"),
        (gzip.compress(b"instance_type,usd\n" + b" " * (300 << 20), 1, mtime=0), "divide the invoice by days"),
    ):
        path.write_bytes(content)
        with pytest.raises(InvalidInput, match=words) as refused:
            await parse_invoice(path, "lambda")
        assert [problem.field for problem in refused.value.problems] == ["invoice"]


async def test_cpu_time_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse_process, "CPU_S", 1)
    path = tmp_path / "upload"
    path.write_bytes(parquet(3_000_000, ""))
    with pytest.raises(InvalidInput, match="takes more than 1 s"):
        await parse(path, "parquet")


async def test_the_process_has_no_secret_and_ends_with_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUBROKER_TEST_SECRET", "hidden")
    path = tmp_path / "upload"
    path.write_bytes(parquet(3_000_000, ""))
    call = asyncio.create_task(parse(path, "parquet"))
    while not (found := workers(path)):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    environment = Path(f"/proc/{found[0]}/environ").read_bytes()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert workers(path) == []
    assert b"hidden" not in environment


def workers(path: Path) -> list[int]:
    """Return the ids of processes that parse the file."""
    found = []
    for process in os.listdir("/proc"):
        if process.isdigit() and Path(f"/proc/{process}/cmdline").exists():
            try:
                arguments = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(path).encode() in arguments and b"broker.preflight.parse_worker" in arguments:
                found.append(int(process))
    return found
