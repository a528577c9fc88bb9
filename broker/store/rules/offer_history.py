"""Documents of the offer history: the runs of one GPU at one provider, as compressed JSON columns.

A document of a bucket holds one run of each group; a document of a day holds the runs of all its buckets. The columns
of a group are differences, because prices change rarely and by little.
"""

import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from broker.domain.market.offer_history import DAY_BUCKETS, HistoryRun, MarketGroup, OfferSample
from broker.reporting.offer_history import joined

LISTED = ""
"""Accelerator of the documents that hold the buckets in which a provider's listing was read."""
Runs = Mapping[MarketGroup, Sequence[HistoryRun]]


class HistoryDocument(NamedTuple):
    """A row of the table."""

    accelerator: str
    provider: str
    bucket: int
    """Number of the first bucket that the document may hold."""
    document: bytes


def listing_of(provider: str) -> MarketGroup:
    """Return the group under which the read listings of a provider are recorded."""
    return MarketGroup(provider, "", "", LISTED, 0, False)


def documents_of(sample: OfferSample) -> list[HistoryDocument]:
    """Return the documents of a bucket; the first one says that the listing was read."""
    listing = listing_of(sample.provider)
    by_gpu: dict[str, dict[MarketGroup, list[HistoryRun]]] = defaultdict(dict)
    by_gpu[LISTED][listing] = [HistoryRun(sample.bucket, 1, None, None, None)]
    for group, figures in sample.figures.items():
        by_gpu[group.accelerator][group] = [HistoryRun(sample.bucket, 1, *figures)]
    return [
        HistoryDocument(accelerator, sample.provider, sample.bucket, packed(runs, sample.bucket))
        for accelerator, runs in by_gpu.items()
    ]


def merged(documents: Iterable[HistoryDocument]) -> list[HistoryDocument]:
    """Return one document for each accelerator, provider and day. Of two figures of a bucket the first given counts."""
    days: dict[tuple[str, str, int], dict[MarketGroup, list[HistoryRun]]] = defaultdict(lambda: defaultdict(list))
    for row in documents:
        day = days[row.accelerator, row.provider, day_of(row.bucket)]
        for group, runs in unpacked(row).items():
            day[group] += runs
    return [
        HistoryDocument(accelerator, provider, start, packed({g: joined(runs) for g, runs in day.items()}, start))
        for (accelerator, provider, start), day in days.items()
    ]


def day_of(bucket: int) -> int:
    """Return the first bucket of the UTC day."""
    return bucket // DAY_BUCKETS * DAY_BUCKETS


def packed(runs: Runs, first: int) -> bytes:
    """Return runs as a document whose buckets are counted from `first`."""
    groups = [
        [group.cloud, group.region, group.gpus, int(group.spot), *_columns(group_runs, first)]
        for group, group_runs in sorted(runs.items())
    ]
    return zlib.compress(json.dumps(groups, separators=(",", ":")).encode(), 9)


def _columns(runs: Sequence[HistoryRun], first: int) -> tuple[list[int | None], ...]:
    """Return the gaps before runs, their lengths, and the changes of each figure."""
    ends = [first, *(run.end for run in runs)]
    gaps: list[int | None] = [run.start - end for run, end in zip(runs, ends, strict=False)]
    lengths: list[int | None] = [run.length for run in runs]
    figures = ([run.lowest for run in runs], [run.median for run in runs], [run.available for run in runs])
    return gaps, lengths, *(_differences(column) for column in figures)


def _differences(column: Sequence[int | None]) -> list[int | None]:
    last, result = 0, list[int | None]()
    for value in column:
        result.append(None if value is None else value - last)
        last = last if value is None else value
    return result


def _sums(column: Sequence[int | None]) -> list[int | None]:
    last, result = 0, list[int | None]()
    for difference in column:
        last += difference or 0
        result.append(None if difference is None else last)
    return result


def unpacked(row: HistoryDocument) -> dict[MarketGroup, list[HistoryRun]]:
    """Return the runs of a document by group."""
    runs: dict[MarketGroup, list[HistoryRun]] = {}
    for cloud, region, gpus, spot, gaps, lengths, *figures in json.loads(zlib.decompress(row.document)):
        group = MarketGroup(row.provider, cloud, region, row.accelerator, gpus, bool(spot))
        start, group_runs = row.bucket, list[HistoryRun]()
        for gap, length, *values in zip(gaps, lengths, *map(_sums, figures), strict=True):
            group_runs.append(HistoryRun(start + gap, length, *values))
            start += gap + length
        runs[group] = group_runs
    return runs
