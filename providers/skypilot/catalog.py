"""Live offers as rows of SkyPilot's catalog, so that SkyPilot finds each quoted machine at its quoted price.

SkyPilot downloads a catalog only if the file is missing or was downloaded before (`.meta/<file>.md5`). It treats the
files that this module writes as the user's, and does not change them. These files are SkyPilot's only source of prices.
SkyPilot downloads only files that no purchase contains (AWS's images and quota codes).
"""

import asyncio
import csv
import io
import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

Row = Mapping[str, str]

_KEYS = {"images.csv": ("Tag", "Region"), "instance_quota_mapping.csv": ("InstanceType",)}
_VMS_KEY = ("InstanceType", "Region", "AvailabilityZone")
"""Columns that identify a row; the other columns are its content."""
_COLUMNS = {
    "vms.csv": (
        "InstanceType", "AcceleratorName", "AcceleratorCount", "vCPUs", "MemoryGiB", "GpuInfo", "Price", "SpotPrice",
        "Region",
    ),
}  # fmt: skip
"""Columns that SkyPilot's code requires, even if no row has a value there."""
_COMMON = {
    "common/accelerators.csv": "AcceleratorName,Clouds\n",
    "common/metadata.csv": "GPU,MemoryGB,Manufacturer\n",
}
_MAX_ROWS = 2000
"""Largest number of rows in a file; the oldest rows are removed first."""


class SkyCatalog:
    """Catalog files of one API server."""

    def __init__(self, home: Path) -> None:
        """Use the catalog folder below `home`, the server's `SKY_RUNTIME_DIR`."""
        self._root = home / ".sky" / "catalogs" / "v8"
        self._held: dict[tuple[str, ...], Row] = {}
        """Rows that running launches need, by file and key."""
        self._holders: Counter[tuple[str, ...]] = Counter()
        """Number of launches that need each of these rows."""
        self._change = asyncio.Condition()

    @asynccontextmanager
    async def holding(self, rows: Mapping[str, Sequence[Row]]) -> AsyncIterator[None]:
        """Keep `rows` in the catalog files inside the context.

        Waits for launches that need another content for the same row.
        """
        rows_by_key = {(file, *_key(file, row)): row for file, file_rows in rows.items() for row in file_rows}
        async with self._change:
            await self._change.wait_for(
                lambda: all(self._held.get(key, row) == row for key, row in rows_by_key.items())
            )
            self._held |= rows_by_key
            self._holders.update(rows_by_key.keys())
        try:
            # The condition's lock prevents two writers from merging into the same file.
            async with self._change:
                await asyncio.to_thread(self._write_rows, rows)
            yield
        finally:
            async with self._change:
                for key in rows_by_key:
                    self._holders[key] -= 1
                    if not self._holders[key]:
                        del self._holders[key], self._held[key]
                self._change.notify_all()

    def _write_rows(self, rows: Mapping[str, Sequence[Row]]) -> None:
        for file, header in _COMMON.items():
            if not (self._root / file).exists():
                self._write(file, header)
        for file, file_rows in rows.items():
            self._merge(file, file_rows)

    def _merge(self, file: str, new_rows: Sequence[Row]) -> None:
        name = file.rpartition("/")[2]
        columns, rows_by_key = list(_COLUMNS.get(name, ())), dict[tuple[str, ...], Row]()
        path = self._root / file
        if path.exists():
            with path.open(newline="", encoding="utf-8") as old_file:
                reader = csv.DictReader(old_file)
                columns += [column for column in reader.fieldnames or () if column not in columns]
                rows_by_key = {_key(file, row): row for row in reader}
        for row in new_rows:
            columns += [column for column in row if column not in columns]
            rows_by_key.pop(_key(file, row), None)
            rows_by_key[_key(file, row)] = row
        for key in list(rows_by_key)[: max(0, len(rows_by_key) - _MAX_ROWS)]:
            if (file, *key) not in self._held:
                del rows_by_key[key]
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows_by_key.values())
        self._write(file, text.getvalue())

    def _write(self, file: str, text: str) -> None:
        path = self._root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)


def _key(file: str, row: Row) -> tuple[str, ...]:
    return tuple(row.get(column, "") for column in _KEYS.get(file.rpartition("/")[2], _VMS_KEY))
