"""Figures of a bucket, runs, and series of a chosen number of points."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from broker.domain.market.offer_history import (
    BUCKET_S,
    BucketFigures,
    HistoryPoint,
    HistoryQuery,
    HistoryRun,
    MarketGroup,
    RecordedHistory,
    bucket_of,
    bucket_start,
)
from broker.domain.offer import Offer
from broker.reporting.offer_history import BucketTally, OfferPoll, joined, series, with_refusals
from tests.conformance.samples import make_line

DAY = datetime(2026, 3, 1, tzinfo=UTC)
FIRST = bucket_of(DAY)
L40S = MarketGroup("simulated", "alpha", "eu", "l40s", 1, True)


def offer(usd: str, **changes: object) -> Offer:
    return replace(make_line().offer, usd_per_hour=Decimal(usd), **changes)  # type: ignore[arg-type]


def tally(*polls: Sequence[Offer]) -> dict[MarketGroup, BucketFigures]:
    whole = BucketTally("simulated", FIRST)
    for offers in polls:
        poll = OfferPoll()
        poll.add(offers)
        whole.add(poll)
    return dict(whole.sample().figures)


def points(
    runs: Sequence[HistoryRun], listed: Sequence[HistoryRun], *, count: int = 10, refused: Sequence[int] = ()
) -> list[HistoryPoint]:
    """Return the points of the first 10 buckets."""
    history = RecordedHistory(runs={L40S: runs}, listed={"simulated": listed}, refused={L40S: refused})
    query = HistoryQuery(accelerators=["l40s"], since=DAY, until=DAY + timedelta(seconds=10 * BUCKET_S - 1))
    _, found = series(history, query, count)
    return [point for one in found for point in one.points]


def test_a_bucket_has_the_minimum_and_the_median_of_its_polls() -> None:
    figures = tally([offer("1.5"), offer("1.0"), offer("3.0")], [offer("0.9"), offer("2.0"), offer("2.5")])
    assert figures == {L40S: BucketFigures(9000, 15000, None)}


def test_availability_is_the_share_of_polls_that_offered() -> None:
    sold_out = offer("1.0", available=False)
    assert tally([offer("1", available=True)], [sold_out])[L40S] == BucketFigures(10000, 10000, 50)
    assert tally([sold_out])[L40S].available == 0


def test_price_of_a_sold_out_offer_counts_only_if_nothing_is_for_sale() -> None:
    """A price at which nothing can be bought would make the market look cheaper than it is."""
    cheap, dear = offer("1", available=False), offer("2", available=True)
    assert tally([cheap, dear])[L40S] == BucketFigures(20000, 20000, 100)
    assert tally([cheap, dear], [cheap])[L40S] == BucketFigures(10000, 10000, 50)


def test_group_that_left_the_listing_was_not_for_sale() -> None:
    assert tally([offer("1")], [])[L40S] == BucketFigures(10000, 10000, 50)
    assert tally([]) == {}


def test_equal_neighbours_are_one_run_and_the_first_of_two_counts() -> None:
    a, b = HistoryRun(5, 2, 10, 10, 100), HistoryRun(7, 3, 10, 10, 100)
    assert joined([b, a]) == [HistoryRun(5, 5, 10, 10, 100)]
    assert joined([HistoryRun(0, 4, 1, 1, 0), HistoryRun(2, 1, 9, 9, 0), HistoryRun(3, 3, 2, 2, 0)]) == [
        HistoryRun(0, 4, 1, 1, 0), HistoryRun(4, 2, 2, 2, 0),
    ]  # fmt: skip


def test_refused_create_makes_a_bucket_unavailable() -> None:
    run = HistoryRun(0, 5, 10, 12, None)
    assert with_refusals([run], []) == [run]
    assert with_refusals([run], {0, 2, 9}) == [
        HistoryRun(0, 1, 10, 12, 0), HistoryRun(1, 1, 10, 12, None), HistoryRun(2, 1, 10, 12, 0),
        HistoryRun(3, 2, 10, 12, None), HistoryRun(9, 1, None, None, 0),
    ]  # fmt: skip
    assert with_refusals([run], {4})[-1] == HistoryRun(4, 1, 10, 12, 0)


def test_outage_of_the_listing_is_unknown_and_a_missing_group_unavailable() -> None:
    """Buckets 0–1: for sale, 2–3: listed without the group, 4–9: the cloud did not answer."""
    found = points([HistoryRun(FIRST, 2, 10000, 12000, 100)], [HistoryRun(FIRST, 4, None, None, None)])
    usd = Decimal(1), Decimal("1.2")
    assert found == [
        HistoryPoint(bucket_start(FIRST), *usd, 1.0),
        HistoryPoint(bucket_start(FIRST + 1), *usd, 1.0),
        HistoryPoint(bucket_start(FIRST + 2), None, None, 0.0),
        HistoryPoint(bucket_start(FIRST + 3), None, None, 0.0),
    ]


def test_a_step_has_the_lowest_price_and_the_median_by_time() -> None:
    runs = [HistoryRun(FIRST, 3, 9000, 20000, 100), HistoryRun(FIRST + 3, 7, 10000, 30000, None)]
    found = points(runs, [HistoryRun(FIRST, 10, None, None, None)], count=3)
    assert [(str(p.lowest_usd), str(p.median_usd)) for p in found] == [
        ("0.9000", "2.0000"), ("1.0000", "3.0000"), ("1.0000", "3.0000"),
    ]  # fmt: skip
    few = [HistoryRun(FIRST, 1, 9000, 20000, 100), HistoryRun(FIRST + 1, 3, 9000, 30000, 100)]
    assert points(few, [], count=3)[0].median_usd == Decimal(3)
    unreported = points([HistoryRun(FIRST, 10, 1, 1, None)], [HistoryRun(FIRST, 10, None, None, None)], count=1)
    assert {p.available for p in unreported} == {None}


def test_series_are_cheapest_first_and_within_the_window() -> None:
    dear, gone = L40S._replace(gpus=8), L40S._replace(region="us")
    history = RecordedHistory(
        runs={
            dear: [HistoryRun(FIRST, 1, 90000, 90000, None)],
            L40S: [HistoryRun(FIRST - 5, 6, 10000, 10000, None)],
            gone: [HistoryRun(FIRST - 5, 2, 1, 1, None)],
        },
        listed={},
        refused={L40S._replace(region="asia"): {FIRST}},
    )
    query = HistoryQuery(accelerators=["l40s"], since=DAY, until=DAY)
    step, found = series(history, query, 100)
    assert step == 1
    assert [(one.group.region, one.group.gpus, len(one.points)) for one in found] == [
        ("eu", 1, 1), ("eu", 8, 1), ("asia", 1, 1),
    ]  # fmt: skip


def test_a_query_accepts_what_matches_every_filter() -> None:
    query = HistoryQuery(accelerators=["l40s"], since=DAY, until=DAY)
    narrow = replace(query, clouds=["alpha"], regions=["eu"], gpus=1, spot=True)
    assert query.accepts(L40S)
    assert narrow.accepts(L40S)
    for changes in ({"accelerator": "l4"}, {"cloud": "beta"}, {"region": "us"}, {"gpus": 2}, {"spot": False}):
        assert not narrow.accepts(L40S._replace(**changes))  # type: ignore[arg-type]
