"""`metrics.jsonl`: a row for every step, also of one that was taken while the disk was full."""

import json
import math
import shutil
from pathlib import Path
from typing import Any


class Journal:
    """Rows that cannot be written wait in memory; `flush` says whether all are on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self._pending: list[str] = []

    def begin(self, source: Path | None = None) -> None:
        """Empty, or with the rows of a checkpoint. Raises OSError."""
        if source is None:
            self._path.write_bytes(b"")
        else:
            shutil.copyfile(source, self._path)
        self._size = self._path.stat().st_size

    def add(self, row: dict[str, Any]) -> None:
        """A number that JSON has not becomes null."""
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._pending.append(json.dumps(plain) + "\n")
        self.flush()

    def flush(self) -> bool:
        """Half a row that a full disk took is overwritten."""
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
