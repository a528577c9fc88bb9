"""The recorder of prices and availability: the rows that it writes about the polls of a market, and their times."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, cast

import pytest

from broker.controllers.base.context import ControllerContext
from broker.controllers.market.offer_history import OfferHistory
from broker.controllers.market.poller import MarketIntervals, MarketPoller
from broker.domain.errors import Rejected, StoreUnavailable
from broker.domain.instance import Caps
from broker.domain.market.offer_history import BUCKET_S, HistoryPoint, HistoryQuery, MarketGroup
from broker.domain.tenancy import Tenant
from broker.ports import Blobs, Provider
from broker.reporting.offer_history import series
from tests.support import build
from tests.support.memory_store.store import MemoryStore
from tests.unit.broker.controllers.market.test_poller import Cloud
from tests.unit.providers.clocks import SteppedClock

POLL_S = 60
TEAM = Tenant(team="default", owner="ann", token_id="t")


class CountedStore(MemoryStore):
    """Store that counts the writes of samples and can be unavailable."""

    writes = 0
    is_down = False

    async def record_offers(self, samples: Any) -> Any:
        if self.is_down:
            raise StoreUnavailable("no answer")
        self.writes += 1
        return await super().record_offers(samples)


class RecordedMarket:
    """A market of clouds that is polled every minute and recorded."""

    def __init__(self, *names: str) -> None:
        self.clock, self.is_clock_right = SteppedClock(), True
        self.store = CountedStore(self.clock)
        self.clouds = {name: Cloud(name, self.clock) for name in names}
        providers: Mapping[str, Any] = self.clouds
        self._poller = MarketPoller(providers, self.clock, MarketIntervals())
        context = ControllerContext(
            installation=build.INSTALLATION, owner="test", store=self.store, blobs=cast(Blobs, None),
            providers=cast(Mapping[str, Provider], providers), clock=self.clock, is_clock_right=self._clock_answer,
        )  # fmt: skip
        self._recorder = OfferHistory(context, self._poller)

    async def _clock_answer(self) -> bool:
        return self.is_clock_right

    async def polls(self, count: int) -> None:
        for _ in range(count):
            await self._poller.step()
            await self._recorder.step()
            self.clock.advance(POLL_S)

    async def points(self, since: datetime) -> dict[MarketGroup, list[HistoryPoint]]:
        names = await self.store.as_tenant(TEAM).recorded_accelerators()
        query = HistoryQuery(accelerators=names, since=since, until=self.clock.now())
        _, items = series(await self.store.as_tenant(TEAM).offer_history(query), query, 1000)
        return {item.group: list(item.points) for item in items}


async def test_a_bucket_is_written_once_when_it_is_over() -> None:
    market = RecordedMarket("good", "other")
    start = market.clock.now()
    await market.polls(BUCKET_S // POLL_S)
    assert market.store.writes == 0
    await market.polls(2 * BUCKET_S // POLL_S + 1)
    assert market.store.writes == 3, "one write a bucket, for all clouds together"
    shown = await market.points(start)
    assert {group.provider for group in shown} == {"good", "other"}
    assert {len(points) for points in shown.values()} == {3}
    assert all(point.lowest_usd for points in shown.values() for point in points)


async def test_failing_cloud_is_unknown_and_an_empty_one_sold_out() -> None:
    market = RecordedMarket("down", "empty")
    start = market.clock.now()
    await market.polls(BUCKET_S // POLL_S)
    market.clouds["down"].fault, market.clouds["empty"].sells = Rejected("no"), False
    await market.polls(BUCKET_S // POLL_S + 1)
    shown = await market.points(start)
    availability = {group.provider: [point.available for point in points] for group, points in shown.items()}
    assert len(availability["down"]) == 1
    assert availability["empty"][1:] == [0.0]


@pytest.mark.parametrize("runs_on_host", [False, True])
async def test_the_daemon_s_own_host_is_no_market(runs_on_host: bool) -> None:
    market = RecordedMarket("cloud")
    market.clouds["cloud"].caps = Caps(spot=True, runs_on_host=runs_on_host)
    start = market.clock.now()
    await market.polls(BUCKET_S // POLL_S + 1)
    assert bool(await market.points(start)) is not runs_on_host


async def test_nothing_is_recorded_at_times_of_a_wrong_clock() -> None:
    market = RecordedMarket("cloud")
    market.is_clock_right = False
    await market.polls(BUCKET_S // POLL_S + 1)
    market.is_clock_right = True
    await market.polls(2 * BUCKET_S // POLL_S)
    assert market.store.writes == 2


async def test_an_outage_of_the_database_loses_no_bucket_that_was_read() -> None:
    market = RecordedMarket("cloud")
    start = market.clock.now()
    await market.polls(BUCKET_S // POLL_S)
    market.store.is_down = True
    with pytest.raises(StoreUnavailable):
        await market.polls(1)
    market.store.is_down = False
    await market.polls(1)
    assert [len(points) for points in (await market.points(start)).values()][:1] == [1]
