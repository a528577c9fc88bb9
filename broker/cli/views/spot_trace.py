"""Spot traces of recorded offers: files of columns `t_s,available,spot_usd,ondemand_usd`.

`benchmarks.spot_table --traces` and `gpubroker simulate --trace` read the folder. A row holds until the next one.
"""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

from broker.api.schemas.offers import OfferSeriesView, PricePoint
from broker.cli.core.exit_codes import BadInput
from broker.domain.market.offer_history import BUCKET_S

COLUMNS = ("t_s", "available", "spot_usd", "ondemand_usd")
MAX_GAP_S = 3600
"""Seconds without an answer of the cloud after which a new trace begins, because a row holds until the next one."""
GroupKey = tuple[str, str, str, str, int]
Row = tuple[int, int, Decimal, Decimal]


@dataclass(frozen=True, kw_only=True)
class SpotTrace:
    """A stretch of time without a gap, in which the availability of a group is known."""

    name: str
    rows: tuple[Row, ...]


def group_of(item: OfferSeriesView) -> GroupKey:
    """Return the key of a series that both markets share."""
    return item.provider, item.cloud, item.region, item.accelerator, item.gpus


def on_demand_prices(items: Iterable[OfferSeriesView]) -> Mapping[GroupKey, Decimal]:
    """Return the median on-demand price by group; region "" holds the lowest of all regions of a cloud."""
    prices: dict[GroupKey, Decimal] = {}
    for item in items:
        price = next((point.median_usd for point in item.points if point.median_usd is not None), None)
        if item.spot or price is None:
            continue
        anywhere = _anywhere(group_of(item))
        prices[group_of(item)] = price
        prices[anywhere] = min(price, prices.get(anywhere, price))
    return prices


def _anywhere(key: GroupKey) -> GroupKey:
    return key[0], key[1], "", key[3], key[4]


def traces(
    item: OfferSeriesView, points: Sequence[PricePoint], on_demand: Mapping[GroupKey, Decimal]
) -> Iterator[SpotTrace]:
    """Yield the traces of a spot series: one for each stretch without a gap. Yield none without an on-demand price."""
    key = group_of(item)
    price = on_demand.get(key, on_demand.get(_anywhere(key)))
    if price is None:
        return
    base = re.sub(r"[^a-z0-9]+", "-", f"{item.cloud}-{item.region}-{item.accelerator}-{item.gpus}x".lower())
    for number, stretch in enumerate(_stretches(points), start=1):
        if rows := _rows(stretch, price):
            yield SpotTrace(name=base if number == 1 else f"{base}-{number}", rows=rows)


def _stretches(points: Sequence[PricePoint]) -> Iterator[Sequence[PricePoint]]:
    start = 0
    for end in range(1, len(points) + 1):
        if end == len(points) or (points[end].at - points[end - 1].at).total_seconds() > MAX_GAP_S:
            yield points[start:end]
            start = end


def _rows(points: Sequence[PricePoint], on_demand: Decimal) -> tuple[Row, ...]:
    """Return the rows of points and a last one that ends the trace; empty if no price is known."""
    last_usd = next((point.lowest_usd for point in points if point.lowest_usd is not None), None)
    if last_usd is None:
        return ()
    start, rows = points[0].at, list[Row]()
    for point in points:
        last_usd = last_usd if point.lowest_usd is None else point.lowest_usd
        rows.append((int((point.at - start).total_seconds()), _is_available(point), last_usd, on_demand))
    last = rows[-1]
    return (*rows, (last[0] + BUCKET_S, *last[1:]))


def _is_available(point: PricePoint) -> int:
    """Return 1 if an offer was for sale most of the time. A listed offer of unreported capacity counts as for sale."""
    return int(point.lowest_usd is not None if point.available is None else point.available >= 0.5)


def window_ends(until: datetime, days: int, window_days: int) -> list[datetime]:
    """Return the ends of windows that cover the last days."""
    return [until - timedelta(days=day) for day in range(0, days, window_days)]


def write(folder: Path, traces: Iterable[SpotTrace]) -> list[str]:
    """Write one file for each trace and return the names. Raises BadInput."""
    names = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for trace in traces:
            path = folder / f"{trace.name}.csv"
            with path.open("w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(COLUMNS)
                writer.writerows(trace.rows)
            names.append(path.name)
    except OSError as e:
        raise BadInput(f"{folder}: {e.strerror}; name a folder that can be written") from None
    return names
