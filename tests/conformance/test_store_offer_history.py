"""Contract of every store for the history of prices and availability."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from broker.domain.market.offer_history import (
    DAY_BUCKETS,
    BucketFigures,
    HistoryQuery,
    MarketGroup,
    OfferSample,
    bucket_of,
    bucket_start,
)
from broker.domain.tenancy import Tenant
from broker.ports import Store
from broker.reporting.offer_history import series

DAY = datetime(2026, 3, 2, tzinfo=UTC)
MIDNIGHT = bucket_of(DAY)
TEAM = Tenant(team="default", owner="ann", token_id="t")
H100 = MarketGroup("vast", "vast", "SE", "h100", 8, True)
Shown = list[tuple[str, int, Decimal | None, float | None]]


def sample(bucket: int, usd: str | None = "2", *, provider: str = "vast", group: MarketGroup = H100) -> OfferSample:
    """Return a bucket in which the group was for sale at this price; None: it was not listed."""
    price = int(Decimal(usd) * 10_000) if usd else 0
    figures = {group: BucketFigures(price, price + 1, 100)} if usd else {}
    return OfferSample(provider=provider, bucket=bucket, figures=figures)


async def shown(store: Store, since: int = MIDNIGHT - 20, until: int = MIDNIGHT + 20, **where: object) -> Shown:
    """Return (region, bucket, lowest price, availability) of every point."""
    values = {"accelerators": ["h100"], "since": bucket_start(since), "until": bucket_start(until), **where}
    query = HistoryQuery(**values)  # type: ignore[arg-type]
    step, found = series(await store.as_tenant(TEAM).offer_history(query), query, until - since + 1)
    assert step == 1
    return [(s.group.region, bucket_of(p.at) - MIDNIGHT, p.lowest_usd, p.available) for s in found for p in s.points]


async def test_history_crosses_midnight_merged_or_not(store: Store) -> None:
    assert list(await store.record_offers([sample(MIDNIGHT + n, f"{3 + n}") for n in range(-3, 3)])) == [True] * 6
    expected: Shown = [("SE", n, Decimal(3 + n), 1.0) for n in range(-3, 3)]
    assert await shown(store) == expected
    assert await store.merge_offer_history(before=MIDNIGHT + 1) > 0
    assert await shown(store) == expected
    await store.record_offers([sample(MIDNIGHT + 3, "6")])
    assert await store.merge_offer_history(before=MIDNIGHT + 10) > 0
    assert await store.merge_offer_history(before=MIDNIGHT + 10) == 0
    assert await shown(store) == [*expected, ("SE", 3, Decimal(6), 1.0)]


async def test_the_first_of_two_brokers_writes_a_bucket(store: Store) -> None:
    """The first broker is determined for each cloud, because a broker may be unable to list one cloud."""
    beta = MarketGroup("aws", "aws", "us", "h100", 8, False)
    assert list(await store.record_offers([sample(MIDNIGHT)])) == [True]
    second = [sample(MIDNIGHT, "1"), sample(MIDNIGHT, "4", provider="aws", group=beta)]
    assert list(await store.record_offers(second)) == [False, True]
    assert await shown(store) == [("SE", 0, Decimal(2), 1.0), ("us", 0, Decimal(4), 1.0)]


async def test_late_writer_changes_no_merged_bucket(store: Store) -> None:
    """A clock that was set back, or a slow broker, offers a bucket that was merged already."""
    await store.record_offers([sample(MIDNIGHT), sample(MIDNIGHT + 1)])
    await store.merge_offer_history(before=MIDNIGHT + 9)
    await store.record_offers([sample(MIDNIGHT, "1"), sample(MIDNIGHT + 1, "1")])
    expected: Shown = [("SE", 0, Decimal(2), 1.0), ("SE", 1, Decimal(2), 1.0)]
    assert await shown(store) == expected
    await store.merge_offer_history(before=MIDNIGHT + 9)
    assert await shown(store) == expected


async def test_outage_is_unknown_and_a_missing_group_is_unavailable(store: Store) -> None:
    await store.record_offers([sample(MIDNIGHT), sample(MIDNIGHT + 1, None), sample(MIDNIGHT + 3)])
    expected: Shown = [("SE", 0, Decimal(2), 1.0), ("SE", 1, None, 0.0), ("SE", 3, Decimal(2), 1.0)]
    assert await shown(store) == expected
    await store.merge_offer_history(before=MIDNIGHT + 9)
    assert await shown(store) == expected


async def test_refused_create_is_unavailability(store: Store) -> None:
    other = H100._replace(region="NO")
    await store.record_offers([sample(MIDNIGHT + n) for n in range(3)])
    for _ in range(2):
        await store.record_refusal(H100, MIDNIGHT + 1)
    await store.record_refusal(other, MIDNIGHT + 5)
    se: Shown = [("SE", n, Decimal(2), float(n != 1)) for n in range(3)]
    # The other region was not in the read listings, and then its create was refused.
    no: Shown = [("NO", n, None, 0.0) for n in (0, 1, 2, 5)]
    assert await shown(store) == [*se, *no]
    assert await shown(store, regions=["SE"]) == se


async def test_groups_are_selected_by_every_filter(store: Store) -> None:
    await store.record_offers([sample(MIDNIGHT), sample(MIDNIGHT + 1, group=H100._replace(accelerator="l4"))])
    assert len(await shown(store, clouds=["vast"], regions=["SE"], gpus=8, spot=True)) == 2
    for other in ({"clouds": ["aws"]}, {"regions": ["NO"]}, {"gpus": 1}, {"spot": False}, {"accelerators": ["a100"]}):
        assert await shown(store, **other) == []
    assert list(await store.recorded_accelerators()) == ["h100", "l4"]


async def test_whole_old_days_are_forgotten(store: Store) -> None:
    await store.record_offers([sample(MIDNIGHT - 1), sample(MIDNIGHT), sample(MIDNIGHT + DAY_BUCKETS)])
    await store.record_refusal(H100, MIDNIGHT - 1)
    await store.record_refusal(H100, MIDNIGHT)
    await store.merge_offer_history(before=MIDNIGHT + DAY_BUCKETS)
    assert await store.forget_offer_history(before=MIDNIGHT) > 0
    assert await store.forget_offer_history(before=MIDNIGHT) == 0
    assert [bucket for _, bucket, _, _ in await shown(store, until=MIDNIGHT + DAY_BUCKETS)] == [0, DAY_BUCKETS]


async def test_nothing_recorded_is_an_empty_history(store: Store) -> None:
    assert list(await store.record_offers([])) == []
    assert await store.merge_offer_history(before=MIDNIGHT) == 0
    assert await shown(store) == []
    assert list(await store.recorded_accelerators()) == []


@pytest.mark.parametrize("usd", ["0.0001", "99999.9999"])
async def test_prices_are_exact_to_a_hundredth_of_a_cent(store: Store, usd: str) -> None:
    await store.record_offers([sample(MIDNIGHT, usd)])
    await store.merge_offer_history(before=MIDNIGHT + 9)
    assert [price for _, _, price, _ in await shown(store)] == [Decimal(usd)]


async def test_no_team_can_write(store: Store) -> None:
    assert not hasattr(store.as_tenant(TEAM), "record_offers")
    assert timedelta(days=1) == DAY_BUCKETS * (bucket_start(1) - bucket_start(0))
