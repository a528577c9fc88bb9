"""Rules of the offer history: figures of a bucket, runs of equal buckets, and series of a chosen number of points."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from statistics import median_low

from broker.domain.market.offer_history import (
    PRICE_UNIT,
    BucketFigures,
    HistoryPoint,
    HistoryQuery,
    HistoryRun,
    MarketGroup,
    OfferSample,
    OfferSeries,
    RecordedHistory,
    bucket_of,
    bucket_start,
)
from broker.domain.offer import Offer

# --- the figures of a bucket


@dataclass(kw_only=True)
class _GroupTally:
    """Figures of one group by poll."""

    lowest: list[int] = field(default_factory=list)
    medians: list[int] = field(default_factory=list)
    for_sale: int = 0
    """Number of polls in which an offer was for sale or its capacity was not reported."""
    is_reported: bool = False
    """True once the cloud reported capacity."""


class OfferPoll:
    """Offers of one answer of a provider, by group."""

    def __init__(self) -> None:
        self.for_sale: dict[MarketGroup, list[int]] = defaultdict(list)
        """Prices of the offers that are not sold out."""
        self.sold_out: dict[MarketGroup, list[int]] = defaultdict(list)
        """Prices of the offers that are sold out."""
        self.reported: set[MarketGroup] = set()
        """Groups whose capacity the cloud reported."""

    def add(self, offers: Iterable[Offer]) -> None:
        for offer in offers:
            group = MarketGroup.of(offer)
            prices = self.sold_out if offer.available is False else self.for_sale
            prices[group].append(int(offer.usd_per_hour / PRICE_UNIT))
            if offer.available is not None:
                self.reported.add(group)

    def prices(self) -> Iterator[tuple[MarketGroup, list[int]]]:
        """Yield the prices of each group: those of the offers for sale, or of the sold-out ones if all are sold out."""
        yield from self.for_sale.items()
        for group, prices in self.sold_out.items():
            if group not in self.for_sale:
                yield group, prices


class BucketTally:
    """Polls of one provider within one bucket."""

    def __init__(self, provider: str, bucket: int) -> None:
        self.provider = provider
        self.bucket = bucket
        self._polls = 0
        self._groups: dict[MarketGroup, _GroupTally] = defaultdict(_GroupTally)

    def add(self, poll: OfferPoll) -> None:
        self._polls += 1
        for group, prices in poll.prices():
            tally = self._groups[group]
            tally.lowest.append(min(prices))
            tally.medians.append(median_low(prices))
            tally.for_sale += group in poll.for_sale
            tally.is_reported |= group in poll.reported

    def sample(self) -> OfferSample:
        """Return the figures so far."""
        figures = {group: self._figures(tally) for group, tally in self._groups.items()}
        return OfferSample(provider=self.provider, bucket=self.bucket, figures=figures)

    def _figures(self, tally: _GroupTally) -> BucketFigures:
        is_known = tally.is_reported or tally.for_sale < self._polls  # a group that was not listed was not for sale
        share = round(100 * tally.for_sale / self._polls)
        return BucketFigures(min(tally.lowest), median_low(tally.medians), share if is_known else None)


# --- runs


def joined(runs: Iterable[HistoryRun]) -> list[HistoryRun]:
    """Return runs in the order of time, equal neighbours as one. Of overlapping runs the one given first counts."""
    result: list[HistoryRun] = []
    for run in sorted(runs, key=lambda run: run.start):  # the sort is stable
        start = max(run.start, result[-1].end) if result else run.start
        if start >= run.end:
            continue
        rest = run._replace(start=start, length=run.end - start)
        if result and result[-1].end == start and result[-1][2:] == rest[2:]:
            result[-1] = result[-1]._replace(length=result[-1].length + rest.length)
        else:
            result.append(rest)
    return result


def with_refusals(runs: Iterable[HistoryRun], refused: Collection[int]) -> list[HistoryRun]:
    """Return runs in which nothing is for sale in the refused buckets. The price stays as listed."""
    if not refused:
        return list(runs)
    result = [HistoryRun(bucket, 1, None, None, 0) for bucket in refused]
    covered: dict[int, HistoryRun] = {}
    for run in runs:
        start = run.start
        for bucket in sorted(bucket for bucket in refused if run.start <= bucket < run.end):
            if bucket > start:
                result.append(run._replace(start=start, length=bucket - start))
            covered[bucket] = run._replace(start=bucket, length=1, available=0)
            start = bucket + 1
        if start < run.end:
            result.append(run._replace(start=start, length=run.end - start))
    return joined([*covered.values(), *result])


# --- series


def series(history: RecordedHistory, query: HistoryQuery, points: int) -> tuple[int, list[OfferSeries]]:
    """Return (buckets of a step, series of the groups), cheapest first, each with at most about `points` points."""
    first, last = bucket_of(query.since), bucket_of(query.until)
    step = max(1, -(-(last - first + 1) // points))
    listed = {provider: _listed(runs, first, last, step) for provider, runs in history.listed.items()}
    all_series = [
        OfferSeries(group=group, points=_points(history, group, listed.get(group.provider, {}), (first, last, step)))
        for group in {**history.runs, **history.refused}
    ]
    all_series = [item for item in all_series if item.points]
    return step, sorted(
        all_series, key=lambda item: (item.lowest_usd is None, item.lowest_usd or Decimal(0), item.group)
    )


def _listed(runs: Sequence[HistoryRun], first: int, last: int, step: int) -> dict[int, int]:
    """Return the number of listed buckets by step."""
    counts: dict[int, int] = defaultdict(int)
    for run in runs:
        for number, buckets in _steps(run, first, last, step):
            counts[number] += buckets
    return counts


def _steps(run: HistoryRun, first: int, last: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield (step, number of the run's buckets in it) within the window."""
    start, end = max(run.start, first), min(run.end, last + 1)
    while start < end:
        until = min(end, (start // step + 1) * step)
        yield start // step, until - start
        start = until


@dataclass(kw_only=True)
class _StepTally:
    """Figures of a group within one step."""

    lowest: list[int] = field(default_factory=list)
    medians: list[tuple[int, int]] = field(default_factory=list)
    """Median price and number of buckets."""
    present: int = 0
    """Buckets in which the group was recorded."""
    reported: int = 0
    """Buckets in which the availability is known."""
    percents: int = 0
    """Sum of the available percentage over these buckets."""


def _points(
    history: RecordedHistory, group: MarketGroup, listed: dict[int, int], window: tuple[int, int, int]
) -> list[HistoryPoint]:
    tallies: dict[int, _StepTally] = defaultdict(_StepTally)
    for run in with_refusals(history.runs.get(group, ()), history.refused.get(group, ())):
        for number, buckets in _steps(run, *window):
            tally = tallies[number]
            tally.present += buckets
            if run.lowest is not None and run.median is not None:
                tally.lowest.append(run.lowest)
                tally.medians.append((run.median, buckets))
            if run.available is not None:
                tally.reported += buckets
                tally.percents += buckets * run.available
    return [
        _point(number * window[2], tallies[number], listed.get(number, 0)) for number in sorted({*tallies, *listed})
    ]


def _point(bucket: int, tally: _StepTally, listed: int) -> HistoryPoint:
    reported = tally.reported + max(0, listed - tally.present)  # a listing without the group: it was not for sale
    return HistoryPoint(
        at=bucket_start(bucket),
        lowest_usd=min(tally.lowest) * PRICE_UNIT if tally.lowest else None,
        median_usd=_weighted_median(tally.medians) * PRICE_UNIT if tally.medians else None,
        available=round(tally.percents / (100 * reported), 4) if reported else None,
    )


def _weighted_median(medians: list[tuple[int, int]]) -> int:
    """Return the price at the middle of all buckets."""
    ordered, rest = sorted(medians), (sum(buckets for _, buckets in medians) + 1) // 2
    position = 0
    while (rest := rest - ordered[position][1]) > 0:
        position += 1
    return ordered[position][0]
