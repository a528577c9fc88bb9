"""Spot traces: price and availability of one zone over time, and their CSV form. Used by `gpubroker simulate`."""

import csv
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite

COLUMNS = ("t_s", "available", "spot_usd", "ondemand_usd")
_NAME = re.compile(r"(?P<zone>.+)_(?P<gpu>[^_]+)_(?P<gpus>[1-9][0-9]?)(?:x(?P<nodes>[1-9][0-9]?))?")


class TraceError(ValueError):
    """A trace that cannot be used: the place, the fault and the fix in one line."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One zone, sampled every `tick_s` seconds."""

    name: str
    tick_s: int
    available: tuple[bool, ...]
    spot_usd: tuple[float, ...]
    """Dollars an hour."""
    on_demand_usd: float

    @property
    def zone(self) -> str:
        """Return the zone of a name such as `us-west-2a_v100_8`, otherwise the whole name."""
        return match["zone"] if (match := _NAME.fullmatch(self.name)) else self.name

    @property
    def gpu(self) -> str:
        """Return the GPU of a name such as `us-west-2a_v100_8`; empty: the name has no such form."""
        return match["gpu"] if (match := _NAME.fullmatch(self.name)) else ""

    @property
    def market(self) -> str:
        """Return GPU and number of GPUs, such as `v100_8`, or `h100_1x4` for four machines.

        Zones of one market sell equal machines.
        """
        return self.name.removeprefix(f"{match['zone']}_") if (match := _NAME.fullmatch(self.name)) else self.name

    @property
    def nodes(self) -> int:
        """Return the number of machines that are bought together: 4 in a name such as `us-west1-b_h100_1x4`.

        The trace is available while all of them are, and its prices are of all of them.
        """
        match = _NAME.fullmatch(self.name)
        return int(match["nodes"] or 1) if match else 1

    def window(self, start: int, ticks: int) -> "Trace":
        """Return `ticks` ticks from tick `start` on."""
        end = start + ticks
        return replace(self, available=self.available[start:end], spot_usd=self.spot_usd[start:end])


@dataclass(frozen=True)
class _Row:
    t_s: float
    is_available: bool
    spot_usd: float
    on_demand_usd: float


def parse_trace(name: str, lines: Iterable[str], tick_s: int = 600, *, place: str = "") -> Trace:
    """Return the trace in a CSV text of columns `t_s,available,spot_usd,ondemand_usd`.

    A row holds until the next one, and the last row ends the trace. `place`: file that errors name. Raises TraceError.
    """
    place = place or name
    rows = list(_rows(lines, place))
    if len(rows) < 2:
        raise TraceError(f"{place}: {len(rows)} rows; write two at least, because the last row ends the trace")
    times = [row.t_s for row in rows]
    count = int((times[-1] - times[0]) // tick_s)
    picks = [rows[bisect_right(times, times[0] + number * tick_s) - 1] for number in range(count)]
    return Trace(
        name=name,
        tick_s=tick_s,
        available=tuple(row.is_available for row in picks),
        spot_usd=tuple(row.spot_usd for row in picks),
        on_demand_usd=rows[0].on_demand_usd,
    )


def _rows(lines: Iterable[str], place: str) -> Iterator[_Row]:
    reader = csv.reader(lines)
    try:
        header = [cell.strip().lstrip("\ufeff") for cell in next(reader, [])]
        missing = [column for column in COLUMNS if column not in header]
        if missing:
            raise TraceError(f"{place}: no column {missing[0]}; write the header {','.join(COLUMNS)}")
        indexes = [header.index(column) for column in COLUMNS]
        before = None
        for cells in filter(None, reader):
            where = f"{place}:{reader.line_num}"
            row = _row(cells, indexes, where)
            if before is not None and row.t_s <= before:
                raise TraceError(f"{where}: t_s {row.t_s:g} is not after {before:g}; sort the rows by time")
            before = row.t_s
            yield row
    except csv.Error as e:
        raise TraceError(f"{place}:{reader.line_num}: {e}; write plain CSV") from None


def _row(cells: Sequence[str], indexes: Sequence[int], where: str) -> _Row:
    numbers = []
    for column, index in zip(COLUMNS, indexes, strict=True):
        text = cells[index].strip() if index < len(cells) else ""
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not isfinite(number) or (number < 0 and column != "t_s"):
            raise TraceError(f"{where}: {column} {text!r} is not a number of at least 0; correct or remove the row")
        numbers.append(number)
    t_s, available, spot_usd, on_demand_usd = numbers
    if on_demand_usd == 0:
        raise TraceError(f"{where}: ondemand_usd is 0; write the price of an on-demand machine in dollars an hour")
    return _Row(t_s, available > 0, spot_usd, on_demand_usd)
