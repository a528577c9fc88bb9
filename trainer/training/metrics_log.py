"""`metrics.jsonl`: one row for every step, including steps taken while the disk was full."""

import json
import math
import shutil
from pathlib import Path
from typing import Any


class Journal:
    """Journal whose rows wait in memory while they cannot be written; `flush` returns whether all are on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self._pending: list[str] = []

    def begin(self, source: Path | None = None) -> None:
        """Start empty, or with the rows of a checkpoint. Raises: OSError."""
        if source is None:
            self._path.write_bytes(b"")
        else:
            shutil.copyfile(source, self._path)
        self._size = self._path.stat().st_size

    def add(self, row: dict[str, Any]) -> None:
        """Add a row; a number that JSON does not have becomes null."""
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._pending.append(json.dumps(plain) + "\n")
        self.flush()

    def flush(self) -> bool:
        """Write the waiting rows; overwrite a row that a full disk truncated."""
        try:
            while self._pending:
                data = self._pending[0].encode()
                with self._path.open("r+b") as file:
                    file.seek(self._size)
                    file.write(data)
                    file.truncate()
                self._size += len(data)
                self._pending.pop(0)
        except OSError:
            return False
        return True
