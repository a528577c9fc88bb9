"""Reads the rows of a data set for a task: counts bad rows, and caches the parsed rows on the disk."""

import hashlib
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainer.batching import mmap_dataset
from trainer.contract.train import TrainConfig
from trainer.core.errors import DataFault
from trainer.core.ipc import rows_note
from trainer.dataset.prompts import DataError, bad_share_message, check_columns, dataset_name, digest
from trainer.dataset.readers import FileRow, each_row
from trainer.models.loading import tokenizer_fingerprint
from trainer.tasks.common import template_date

_log = logging.getLogger(__name__)
NAMED_FAULTS = 20
CHECKED_ROWS = 100
"""Rows that are checked for the configured columns. A column missing in single rows is an error of those rows."""
Row = dict[str, Any]
"""Cells by column."""
RowParser = Callable[[Row, int], Any]
"""Function that parses a row with its number from 1; a list has several parsed rows. Raises DataError for a bad row."""
RowObserver = Callable[[int, Row, Any], None]
"""Callback for each usable row: its number from 1, its cells, and a parsed row; called for each parsed row."""


class ExampleReader:
    """Reader of one data set. A bad row is counted and left out."""

    def __init__(self, config: TrainConfig, parse_row: RowParser, parsed_type: type[Any] | None) -> None:
        """`parsed_type`: dataclass that `parse_row` returns; None: the parsed rows stay in memory."""
        self._config, self._parse_row, self._parsed_type = config, parse_row, parsed_type
        self._where = dataset_name(config.data.path)
        self.rows = 0
        """Number of rows of the data set, bad rows included."""
        self.bad_rows = 0
        """Number of rows that cannot be used."""
        self.notices: Counter[str] = Counter()
        """Number of rows by what was converted, or not used, in words for users."""
        self.faults: list[str] = []
        """Errors of the first NAMED_FAULTS bad rows, with file and row."""

    def read(
        self,
        path: Path,
        data_format: Any,
        tokenizer: Any,
        observe: RowObserver | None = None,
        *,
        cache: Path | None = None,
        data_sha256: str = "",
    ) -> Sequence[Any]:
        """Return the parsed usable rows, memory-mapped if they are of a dataclass. Raises DataError.

        `cache`: folder of the token cache, which all processes of this machine share; None: a temporary folder.
        `data_sha256`: hash of the data; empty: the cache is not reused.
        """
        if self._parsed_type is None:
            parsed: list[Any] = []
            self._read_rows(path, data_format, observe, parsed.append)
            return parsed
        if cache is None or not data_sha256:
            with tempfile.TemporaryDirectory(prefix="rows-") as temporary:  # A mapped file outlives its deletion.
                return self._read_cached(path, data_format, tokenizer, observe, Path(temporary), data_sha256)
        with mmap_dataset.folder_lock(cache):
            return self._read_cached(path, data_format, tokenizer, observe, cache, data_sha256)

    def check(self) -> None:
        """Raise DataFault if the data set has no row, or a larger share of bad rows than `data.bad_share`."""
        if not self.rows:
            raise DataFault(f"{self._where}: has a header or an empty list but no row; give at least one row")
        if os.environ.get("RANK", "0") == "0":
            for notice in self.notice_lines():
                _log.warning("%s", notice)
        if not self.bad_rows:
            return
        if problem := bad_share_message(self.bad_rows, self.rows, self._config.data.bad_share, self.faults[0]):
            raise DataFault(problem)
        if os.environ.get("RANK", "0") == "0":
            _log.warning("%d of %d rows are bad and left out; the first: %s", self.bad_rows, self.rows, self.faults[0])

    def notice_all(self, text: str) -> None:
        """Add a notice that concerns every row, and log it, after `check`."""
        self.notices[text] = self.rows
        if os.environ.get("RANK", "0") == "0":
            _log.warning("%s: %s", self._where, text)

    def notice_lines(self) -> list[str]:
        """Return the notices with their numbers of rows, the most frequent first."""
        return [
            f"{self._where}: in {count:,} of {self.rows:,} rows {text}" for text, count in self.notices.most_common()
        ]

    # ------------------------------------------------------------------------------------------------------ token cache

    def _read_cached(
        self, path: Path, data_format: Any, tokenizer: Any, observe: RowObserver | None, folder: Path, data_sha256: str
    ) -> Sequence[Any]:
        """Return the parsed rows in `folder`; write them first if they are absent or were parsed from other inputs."""
        assert self._parsed_type is not None
        identity = self._identity(data_format, tokenizer, data_sha256)
        note = rows_note(folder) if data_sha256 and observe is None else None
        if note is not None and note["identity"] == identity:
            self.rows, self.bad_rows, self.faults = note["rows"], note["bad"], note["faults"]
            self.notices = Counter(note["notices"])
        else:
            writer = mmap_dataset.DatasetWriter(folder, self._parsed_type)
            self._read_rows(path, data_format, observe, writer.append)
            if data_sha256 and digest(path) != data_sha256:
                raise DataError(f"{self._where}: its file {path.name} has changed since it was hashed; start again")
            counts = {"rows": self.rows, "bad": self.bad_rows, "faults": self.faults, "notices": self.notices}
            writer.close({"identity": identity, **counts})
        return mmap_dataset.MmapDataset(folder, self._parsed_type)

    def _identity(self, data_format: Any, tokenizer: Any, data_sha256: str) -> str:
        """Return a hash of all inputs that change the parsed rows."""
        config = self._config
        parts = (
            mmap_dataset.VERSION, data_sha256, data_format, config.task, config.max_length,
            config.data.model_dump_json(exclude={"path", "eval_share", "bad_share"}),
            tokenizer_fingerprint(tokenizer), template_date.rendered_date(tokenizer),
        )  # fmt: skip
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    # ------------------------------------------------------------------------------------------------------------- rows

    def _read_rows(
        self, path: Path, data_format: Any, observe: RowObserver | None, append: Callable[[Any], None]
    ) -> None:
        """Parse all rows and pass the usable ones to `append`. Raises DataError for an error that concerns all rows."""
        self.rows, self.bad_rows, self.faults, self.notices = 0, 0, [], Counter()
        columns: dict[str, Any] = {}
        for number, row in enumerate(each_row(path, data_format, self._where), 1):
            self.rows = number
            if isinstance(row, DataError):
                self._leave_out(row)
                continue
            if number <= CHECKED_ROWS:
                columns.update(row)
            if number == CHECKED_ROWS:
                check_columns(self._config.data, columns)
            try:
                parsed = self._parse_row(row, number)
            except DataError as e:
                self._leave_out(self._with_file(e, row, number))
                continue
            for example in parsed if isinstance(parsed, list) else (parsed,):
                append(example)
                if observe is not None:
                    observe(number, row, example)
        if columns and self.rows < CHECKED_ROWS:
            check_columns(self._config.data, columns)

    def _leave_out(self, error: DataError) -> None:
        self.bad_rows += 1
        if self.bad_rows <= NAMED_FAULTS:
            self.faults.append(str(error))

    def _with_file(self, error: DataError, row: Row, number: int) -> DataError:
        """Return the error of a row, with the name of the row's file if the data set has several files."""
        place = f"{self._where} row {number}"
        if not isinstance(row, FileRow) or not str(error).startswith(place):
            return error
        return DataError(row.place + str(error).removeprefix(place))
