"""Least-recently-used cache with a bound on memory, for values whose size depends on users' files."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
COLUMN_BYTES, VALUE_BYTES = 8 * 1024, 350
"""Memory of a column's statistics, and of one of its distinct values, in a data set's summary."""


class BoundedCache(Generic[K, V]):
    """Cache that evicts the least recently used values beyond `max_bytes` or `most` values."""

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self._max_bytes, self._max_entries = max_bytes, max_entries
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """Stated size of all values."""
        return self._bytes

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Add a value of about `size` bytes. A value that alone exceeds the bound is not kept, and evicts no other."""
        if (replaced := self._entries.pop(key, None)) is not None:
            self._bytes -= replaced[1]
        if size > self._max_bytes:
            return
        self._entries[key] = (value, size)
        self._bytes += size
        while self._bytes > self._max_bytes or len(self._entries) > self._max_entries:
            _, (_, evicted) = self._entries.popitem(last=False)
            self._bytes -= evicted


def summary_bytes(summary: Mapping[str, Any] | None) -> int:
    """Return the approximate memory of an upload's summary in bytes."""
    columns = (summary or {}).get("columns", {})
    return 1024 + sum(COLUMN_BYTES + VALUE_BYTES * len(column.get("values") or ()) for column in columns.values())
