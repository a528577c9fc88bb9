"""Prices and availability of offers over time, in buckets of five minutes.

Written by `broker.controllers.market.offer_history`, read by the API and by rules that learn from the market.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import NamedTuple

from broker.domain.offer import Offer

BUCKET_S = 300
"""Seconds of a bucket."""
DAY_BUCKETS = 86_400 // BUCKET_S
PRICE_UNIT = Decimal("0.0001")
"""Dollars an hour by which recorded prices are counted."""
KEEP_DAYS = 90
"""Days after which a bucket is deleted."""


def bucket_of(at: datetime) -> int:
    """Return the number of the bucket that contains a time."""
    return int(at.timestamp() // BUCKET_S)


def bucket_start(bucket: int) -> datetime:
    """Return the first moment of a bucket."""
    return datetime.fromtimestamp(bucket * BUCKET_S, UTC)


class MarketGroup(NamedTuple):
    """Offers that are recorded together: one GPU and count of a cloud's region, in one market."""

    provider: str
    cloud: str
    region: str
    accelerator: str
    gpus: int
    spot: bool

    @classmethod
    def of(cls, offer: Offer) -> "MarketGroup":
        return cls(offer.provider, offer.cloud, offer.region, offer.accelerator, offer.gpus, offer.spot)


class HistoryRun(NamedTuple):
    """Consecutive buckets in which a group's figures did not change. Prices count PRICE_UNITs for the whole machine."""

    start: int
    """Number of the first bucket."""
    length: int
    """Number of buckets."""
    lowest: int | None
    """Lowest price; None: unknown."""
    median: int | None
    """Median price of the group's offers; None: unknown."""
    available: int | None
    """Percentage of polls in which an offer was for sale; None: the cloud does not report it."""

    @property
    def end(self) -> int:
        return self.start + self.length


class BucketFigures(NamedTuple):
    """Figures of a group in one bucket; the fields are those of HistoryRun."""

    lowest: int | None
    median: int | None
    available: int | None


@dataclass(frozen=True, kw_only=True)
class OfferSample:
    """One bucket of one provider whose listing was read. Groups that are not in `figures` were not for sale."""

    provider: str
    bucket: int
    figures: Mapping[MarketGroup, BucketFigures] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class HistoryQuery:
    """Selection of recorded groups. An empty filter accepts every value."""

    accelerators: Collection[str]
    """Canonical names, each exact."""
    since: datetime
    until: datetime
    clouds: Collection[str] = ()
    regions: Collection[str] = ()
    gpus: int | None = None
    """Number of GPUs; None: any."""
    spot: bool | None = None
    """None: both markets."""

    def accepts(self, group: MarketGroup) -> bool:
        return (
            group.accelerator in self.accelerators
            and (not self.clouds or group.cloud in self.clouds)
            and (not self.regions or group.region in self.regions)
            and self.gpus in (None, group.gpus)
            and self.spot in (None, group.spot)
        )


@dataclass(frozen=True, kw_only=True)
class RecordedHistory:
    """Recorded buckets of a query, in the order of time."""

    runs: Mapping[MarketGroup, Sequence[HistoryRun]] = field(default_factory=dict)
    listed: Mapping[str, Sequence[HistoryRun]] = field(default_factory=dict)
    """Buckets in which a provider's listing was read, by provider; in other buckets its offers are unknown."""
    refused: Mapping[MarketGroup, Collection[int]] = field(default_factory=dict)
    """Buckets in which a create was refused because the cloud had no capacity."""


class HistoryPoint(NamedTuple):
    """Figures of a group over one step of a series."""

    at: datetime
    """Start of the step."""
    lowest_usd: Decimal | None
    """Lowest price of a machine; None: no price was known."""
    median_usd: Decimal | None
    available: float | None
    """Share of the known time in which an offer was for sale; None: the cloud does not report it."""


@dataclass(frozen=True, kw_only=True)
class OfferSeries:
    """History of one group. Steps in which its cloud was not listed have no point."""

    group: MarketGroup
    points: Sequence[HistoryPoint]

    @property
    def lowest_usd(self) -> Decimal | None:
        return min((point.lowest_usd for point in self.points if point.lowest_usd is not None), default=None)
