"""Attacks by uploads of a few kilobytes that need gigabytes or minutes to parse."""

import asyncio
import io
import zipfile

import arro3.core
import arro3.io

from tests.security.abuse.registry import attack
from tests.security.abuse.target import Target, repeated


def _parquet(rows: int, size: int) -> bytes:
    kind = arro3.core.DataType.utf8() if size else arro3.core.DataType.int64()
    cells = ["x" * size if size else 1] * rows
    table, buffer = arro3.core.Table.from_pydict({"a": arro3.core.Array(cells, type=kind)}), io.BytesIO()
    arro3.io.write_parquet(table, buffer, compression="zstd(3)")
    return buffer.getvalue()


def costly_parquet() -> bytes:
    """Return a file of few kilobytes that takes its parser seconds of CPU time."""
    return _parquet(10_000_000, 0)


def _zipped(content: bytes, method: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("a.jsonl", content)
    return buffer.getvalue()


async def _refused(target: Target, data: bytes, name: str) -> None:
    status, answer = await target.upload(data, name)
    assert status in (422, 429), answer


@attack
async def parquet_that_unpacks_to_gigabytes(target: Target, seconds: float) -> None:
    data = await asyncio.to_thread(_parquet, 256, 3_000_000)
    await repeated(seconds, lambda: _refused(target, data, "a.parquet"))


@attack
async def parquet_of_much_cpu_time_without_its_client(target: Target, seconds: float) -> None:
    """Upload files that take long to parse, and disconnect during the parse."""
    data = await asyncio.to_thread(costly_parquet)

    async def leave() -> None:
        try:
            async with asyncio.timeout(1):
                await target.upload(data, "a.parquet")
        except TimeoutError:
            return

    await repeated(seconds, leave, parallel=8)


@attack
async def texts_of_ever_new_columns_and_deep_cells(target: Target, seconds: float) -> None:
    columns = b"".join(b'{"c%07d":1}\n' % number for number in range(180_000))
    deep = b'{"a":' + b"[" * 900 + b"]" * 900 + b"}\n"
    files = (columns, deep, b'{"a":' + b"[" * 2_000_000 + b"\n")
    await repeated(seconds, lambda: asyncio.gather(*(_refused(target, data, "a.jsonl") for data in files)))


@attack
async def zip_bombs(target: Target, seconds: float) -> None:
    content = b'{"a":"' + b"x" * 60_000_000 + b'"}\n'
    methods = (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)
    files = await asyncio.to_thread(lambda: [_zipped(content, method) for method in methods])
    await repeated(seconds, lambda: asyncio.gather(*(_refused(target, data, "a.zip") for data in files)))
