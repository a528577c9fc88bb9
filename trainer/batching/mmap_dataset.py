"""Memory-mapped dataset of tokenised examples, shared by all processes of a machine.

The dataset may be larger than the memory, and rows can be read in any order.
"""

import dataclasses
import fcntl
import heapq
import json
import mmap
import os
import typing
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from trainer.batching import sampler
from trainer.core.ipc import INDEX, NOTE, ROWS

E = TypeVar("E")
T = TypeVar("T")
VERSION = 6
WIDTH = array("i").itemsize


class _RecordFormat:
    """File format of the examples of one dataclass.

    A record has the lengths of the example's lists of integers, the lists, then the other fields as JSON. Nothing is
    pickled, because each process reads files that another process wrote.
    """

    def __init__(self, kind: type) -> None:
        self.kind = kind
        hints = typing.get_type_hints(kind)
        self._fields: list[tuple[str, str, _RecordFormat | None]] = []
        for field in dataclasses.fields(kind):
            hint = hints[field.name]
            nested = _RecordFormat(hint) if dataclasses.is_dataclass(hint) and isinstance(hint, type) else None
            storage = "ints" if hint == list[int] else "spans" if typing.get_origin(hint) is tuple else "plain"
            self._fields.append((field.name, storage, nested))
        self.lists: int = sum(nested.lists if nested else int(storage == "ints") for _, storage, nested in self._fields)

    def take_apart(self, example: Any, lists: list["array[int]"]) -> list[Any]:
        """Append the example's lists of integers to `lists` and return the other fields."""
        rest: list[Any] = []
        for name, storage, nested in self._fields:
            value = getattr(example, name)
            if nested is not None:
                rest.append(nested.take_apart(value, lists))
            elif storage == "ints":
                lists.append(array("i", value))
            else:
                rest.append(value)
        return rest

    def put_together(self, lists: Iterator[list[int]], rest: Iterator[Any]) -> Any:
        fields: dict[str, Any] = {}
        for name, storage, nested in self._fields:
            if nested is not None:
                fields[name] = nested.put_together(lists, iter(next(rest)))
            elif storage == "ints":
                fields[name] = next(lists)
            else:
                value = next(rest)
                fields[name] = tuple(map(tuple, value)) if storage == "spans" else value
        return self.kind(**fields)


class DatasetWriter(Generic[E]):
    """Writer of examples of one dataclass to a folder."""

    def __init__(self, folder: Path, kind: type[E]) -> None:
        self._folder, self._format = folder, _RecordFormat(kind)
        self._ends = array("Q", [0])
        for name in (NOTE, ROWS):  # Another process may have mapped the file, so it must not be truncated.
            (folder / name).unlink(missing_ok=True)
        self._file = (folder / ROWS).open("wb")

    def append(self, example: E) -> None:
        lists: list[array[int]] = []
        rest = json.dumps(self._format.take_apart(example, lists), separators=(",", ":")).encode()
        record = array("i", map(len, lists)).tobytes() + b"".join(numbers.tobytes() for numbers in lists) + rest
        self._file.write(record)
        self._ends.append(self._ends[-1] + len(record))

    def close(self, note: dict[str, Any]) -> None:
        """Finish the dataset: write the index, then `note`, whose existence marks the dataset as complete."""
        self._file.close()
        (self._folder / INDEX).write_bytes(self._ends.tobytes())
        temporary = self._folder / f"{NOTE}.tmp"
        temporary.write_text(json.dumps(note))
        temporary.replace(self._folder / NOTE)


class MmapDataset(Sequence[E]):
    """Examples that a `DatasetWriter` wrote."""

    def __init__(self, folder: Path, kind: type[E]) -> None:
        self._format = _RecordFormat(kind)
        self._ends = array("Q", (folder / INDEX).read_bytes())
        with (folder / ROWS).open("rb") as file:
            empty = not os.fstat(file.fileno()).st_size
            self._bytes: Any = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        if number < 0 or number >= len(self):
            raise IndexError(number)
        record: bytes = self._bytes[self._ends[number] : self._ends[number + 1]]
        count = self._format.lists
        lengths = array("i", record[: count * WIDTH])
        lists, at = [], count * WIDTH
        for length in lengths:
            lists.append(array("i", record[at : at + length * WIDTH]).tolist())
            at += length * WIDTH
        return self._format.put_together(iter(lists), iter(json.loads(record[at:])))


class Subset(Sequence[T]):
    """Selected rows of a sequence; `convert` is called each time a row is read."""

    def __init__(self, rows: Sequence[Any], numbers: Iterable[int], convert: Callable[[Any], T]) -> None:
        self._rows, self._numbers, self._convert = rows, array("Q", numbers), convert

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        return self._convert(self._rows[self._numbers[number]])


def train_eval_split(
    rows: Sequence[T], seed: int, share: float, chats: Sequence[int] | None = None
) -> tuple[Sequence[T], Sequence[T]]:
    """Return the training rows and the held-out rows. `chats`: see `sampler.split`."""
    train, held_out = sampler.split(seed, len(rows), share, chats)
    return Subset(rows, train, _unchanged), Subset(rows, held_out, _unchanged)


def _unchanged(row: T) -> T:
    return row


def largest(rows: Sequence[T], count: int, size: Callable[[T], int]) -> list[T]:
    """Return the `count` rows of the largest sizes, the largest first."""
    return heapq.nlargest(count, rows, key=size)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock within the block. One process of the machine has it at a time.

    The kernel releases it if the process dies.
    """
    with (folder / "rows.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
