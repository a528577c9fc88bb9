"""Our live offers as rows of SkyPilot's catalog, so that it knows what was quoted, at the price that was quoted.

SkyPilot downloads a catalog only where the file is missing or was downloaded before (`.meta/<file>.md5`); what is
written here it takes for the user's and leaves alone. Prices come from nowhere else, and no network is needed.
A file that no purchase brings (AWS's images and quota codes) is left to SkyPilot's download.
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
"""What makes a row another one; the rest is its content."""
_COLUMNS = {
    "vms.csv": (
        "InstanceType", "AcceleratorName", "AcceleratorCount", "vCPUs", "MemoryGiB", "GpuInfo", "Price", "SpotPrice",
        "Region",
    ),
}  # fmt: skip
"""Columns that SkyPilot's code names, whether or not a row has something there."""
_COMMON = {
    "common/accelerators.csv": "AcceleratorName,Clouds\n",
    "common/metadata.csv": "GPU,MemoryGB,Manufacturer\n",
}
_MOST = 2000
"""Rows of a file; the oldest go first."""


class SkyCatalog:
    """The catalog of one API server."""

    def __init__(self, home: Path) -> None:
        """`home`: the server's `SKY_RUNTIME_DIR`."""
        self._root = home / ".sky" / "catalogs" / "v8"
        self._held: dict[tuple[str, ...], Row] = {}
        self._holders: Counter[tuple[str, ...]] = Counter()
        self._change = asyncio.Condition()

    @asynccontextmanager
    async def holding(self, rows: Mapping[str, Sequence[Row]]) -> AsyncIterator[None]:
        """While inside, SkyPilot reads these rows. Waits for a launch that needs another content in one of them."""
        wanted = {(file, *_key(file, row)): row for file, given in rows.items() for row in given}
        async with self._change:
            await self._change.wait_for(lambda: all(self._held.get(key, row) == row for key, row in wanted.items()))
            self._held |= wanted
            self._holders.update(wanted.keys())
        try:
            # Under the condition's lock, so that no two writers merge into the same file.
            async with self._change:
                await asyncio.to_thread(self._put, rows)
            yield
        finally:
            async with self._change:
                for key in wanted:
                    self._holders[key] -= 1
                    if not self._holders[key]:
                        del self._holders[key], self._held[key]
                self._change.notify_all()

    def _put(self, rows: Mapping[str, Sequence[Row]]) -> None:
        for file, header in _COMMON.items():
            if not (self._root / file).exists():
                self._write(file, header)
        for file, given in rows.items():
            self._merge(file, given)

    def _merge(self, file: str, given: Sequence[Row]) -> None:
        name = file.rpartition("/")[2]
        columns, known = list(_COLUMNS.get(name, ())), dict[tuple[str, ...], Row]()
        path = self._root / file
        if path.exists():
            with path.open(newline="", encoding="utf-8") as old:
                reader = csv.DictReader(old)
                columns += [column for column in reader.fieldnames or () if column not in columns]
                known = {_key(file, row): row for row in reader}
        for row in given:
            columns += [column for column in row if column not in columns]
            known.pop(_key(file, row), None)
            known[_key(file, row)] = row
        for key in list(known)[: max(0, len(known) - _MOST)]:
            if (file, *key) not in self._held:
                del known[key]
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(known.values())
        self._write(file, text.getvalue())

    def _write(self, file: str, text: str) -> None:
        path = self._root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)


def _key(file: str, row: Row) -> tuple[str, ...]:
    return tuple(row.get(column, "") for column in _KEYS.get(file.rpartition("/")[2], _VMS_KEY))
