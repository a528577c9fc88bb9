"""Listings of offers and providers, and the history of prices and availability, for charts and for traces."""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

from broker.api.core.auth import Caller
from broker.api.schemas.offers import (
    OfferHistoryView,
    OfferList,
    OfferSeriesView,
    OfferView,
    PricePoint,
    ProviderList,
    ProviderStatusView,
    ProviderView,
)
from broker.api.schemas.queries import MAX_POINTS, OfferHistoryQuery
from broker.api.service.interfaces import MarketReader
from broker.domain.market.offer_history import BUCKET_S, HistoryQuery, OfferSeries, RecordedHistory
from broker.domain.offer import CredentialCheck, Offer
from broker.estimator.speed.hardware import matches
from broker.ports import Clock, Store
from broker.reporting.offer_history import series
from broker.runtime.cpu_threads import CpuThreads

MAX_READS = 2
"""Maximum number of concurrent reads: one of 90 days takes up to three seconds of CPU in threads."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
"""Start of the first bucket."""


def for_sale(market: MarketReader, *, provider: str | None, accelerators: Collection[str], limit: int) -> OfferList:
    """List offers, cheapest first. An empty filter accepts every offer."""
    matching = matching_offers(market, provider=provider, accelerators=accelerators)
    views = tuple(OfferView.model_validate(o) for o in matching[:limit])
    sources = tuple(ProviderStatusView.model_validate(s) for s in market.status())
    return OfferList(items=views, total=len(matching), providers=sources)


def matching_offers(market: MarketReader, *, provider: str | None, accelerators: Collection[str]) -> list[Offer]:
    """Return the offers, cheapest first. An empty filter accepts every offer."""
    matching = [
        o
        for o in market.offers()
        if provider in (None, o.provider)
        and (not accelerators or any(matches(name, o.accelerator) for name in accelerators))
    ]
    matching.sort(key=lambda o: (o.usd_per_hour, o.id))
    return matching


def providers(market: MarketReader, checks: Mapping[str, CredentialCheck]) -> ProviderList:
    """List configured providers. `checks`: checks of their credentials, by provider; empty: not checked."""
    caps = market.caps()
    views = []
    for status in market.status():
        check = checks.get(status.name, CredentialCheck())
        fields = asdict(check) | {"self_stop": caps[status.name].self_stop}
        views.append(ProviderView(**ProviderStatusView.model_validate(status).model_dump(), **fields))
    return ProviderList(items=tuple(views))


class OfferHistoryService:
    """Reads the recorded market. The market belongs to no team, so every caller reads the same."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._threads = CpuThreads()
        self._reads = asyncio.Semaphore(MAX_READS)

    async def history(self, caller: Caller, query: OfferHistoryQuery) -> OfferHistoryView:
        """Return the series that a query selects, cheapest first. Raises Busy."""
        rows = self._store.as_tenant(caller.tenant)
        names = [
            name for name in await rows.recorded_accelerators() if any(matches(pattern, name) for pattern in query.gpu)
        ]
        until = query.until or self._clock.now()
        where = HistoryQuery(
            accelerators=names,
            since=until - min(timedelta(days=query.days), max(until - EPOCH, timedelta(0))),
            until=until,
            clouds=query.cloud,
            regions=query.region,
            gpus=query.gpus,
            spot=None if query.market is None else query.market == "spot",
        )
        async with self._reads:
            recorded = await rows.offer_history(where) if names else RecordedHistory()
            return await self._threads.of_team(caller.team)(lambda: _view(recorded, where, query))


def _view(recorded: RecordedHistory, where: HistoryQuery, query: OfferHistoryQuery) -> OfferHistoryView:
    step, items = series(recorded, where, query.points)
    return OfferHistoryView(
        since=where.since,
        until=where.until,
        step_s=step * BUCKET_S,
        total=len(items),
        items=tuple(map(_series_view, items[: min(query.limit, MAX_POINTS // query.points)])),
    )


def _series_view(item: OfferSeries) -> OfferSeriesView:
    points = tuple(PricePoint.model_construct(**point._asdict()) for point in item.points)
    return OfferSeriesView(**item.group._asdict(), points=points)
