"""Timelines of spot markets follow from listed offers, refused creates and own machines."""

from dataclasses import replace

import pytest

from broker.domain.market.offer_history import HistoryRun, MarketGroup, RecordedHistory
from broker.domain.market.spot_evidence import OwnSpotRun, SpotEvidence
from broker.estimator import spot_timelines
from broker.estimator.spot_hazards import UNKNOWN_AGE_MIN, Timeline, market_history, union
from broker.estimator.spot_timelines import bounded, timelines

ZONE = MarketGroup("aws", "aws", "us-east-1a", "h100", 8, True)
MARKET = (*ZONE[:5], 1)
NOW = 10_000.0


def own(begin_min: float, end_min: float, *, is_preempted: bool = False, nodes: int = 1) -> OwnSpotRun:
    return OwnSpotRun(ZONE, nodes, begin_min * 60, end_min * 60, is_preempted)


def listed(*runs: tuple[int, int, int | None], begin: int = 0, length: int = 20) -> RecordedHistory:
    """Return a history of `length` listed buckets. `runs`: first bucket, number of buckets and availability."""
    found = [HistoryRun(start, count, 1, 1, available) for start, count, available in runs]
    return RecordedHistory(runs={ZONE: found}, listed={"aws": [HistoryRun(begin, length, None, None, None)]})


def line(
    *runs: OwnSpotRun,
    history: RecordedHistory = RecordedHistory(),  # noqa: B008 - it is immutable
    refused: dict[MarketGroup, set[int]] | None = None,
) -> Timeline | None:
    recorded = history if refused is None else replace(history, refused=refused)
    return dict(timelines(SpotEvidence(recorded=recorded, runs=runs), NOW)).get(MARKET)


def test_own_machines_show_capacity_until_they_end_or_are_preempted() -> None:
    assert line(own(100, 200)) == ((100, True), (200, None))
    assert line(own(100, 200, is_preempted=True)) == ((100, True), (200, False), (205, None))
    assert line(own(100, 200, is_preempted=True), own(150, 300)) == ((100, True), (300, None))
    assert line(own(200, 100)) == ((200, None),)
    assert line(own(100, 200, nodes=4)) is None


def test_the_latest_state_holds_until_the_next_read() -> None:
    assert line(own(100, NOW)) == ((100, True),)
    assert line(own(100, NOW - 20, is_preempted=True)) == ((100, True), (NOW - 20, False))


def test_a_refused_create_shows_that_there_is_no_capacity() -> None:
    assert line(refused={ZONE: {20, 21}}) == ((100, False), (110, None))
    assert line(own(0, 300, nodes=2), refused={ZONE: {20}}) == ((100, False), (105, None))
    assert line(refused={ZONE._replace(spot=False): {20}}) is None


def test_listings_show_availability_and_gaps() -> None:
    assert line(history=listed((0, 4, 100), (4, 4, 10), (8, 12, 60))) == (
        (0, True),
        (20, False),
        (40, True),
        (100, None),
    )
    assert line(history=listed((5, 5, None), (12, 8, None))) == ((25, True), (50, False), (60, True), (100, None))
    assert line(history=listed((0, 10, None))) == ((0, True), (50, False), (100, None))


def test_a_cloud_that_lists_everything_always_shows_nothing() -> None:
    assert line(history=listed((0, 20, None))) is None
    assert line(history=RecordedHistory(runs={ZONE: []})) is None


def test_own_machines_count_more_than_listings() -> None:
    assert line(own(10, 30), history=listed((0, 20, 0))) == ((0, False), (10, True), (30, False), (100, None))


def test_timelines_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot_timelines, "MAX_CHANGES", 4)
    monkeypatch.setattr(spot_timelines, "MAX_MARKETS", 1)
    long = line(*(own(100 * n, 100 * n + 10) for n in range(9))) or ()
    assert list(long) == [(700, True), (710, None), (800, True), (810, None)]
    other = (*MARKET[:5], 2)
    assert bounded({other: long[:1], MARKET: long}) == {MARKET: long}
    assert bounded({other: long[:1]}) == {other: long[:1]}


def test_unobserved_time_is_neither_exposure_nor_event() -> None:
    seen = market_history(((0.0, True), (100.0, None), (5000.0, True)), 5000.0)
    before = market_history(((0.0, True),), 100.0)
    assert (seen.is_up, seen.age_min, seen.falls, seen.rises) == (True, UNKNOWN_AGE_MIN, 0, 0)
    assert 0 < seen.expected_falls < before.expected_falls
    ended = market_history(((0.0, False), (10.0, None)), 50.0)
    assert (ended.is_up, ended.falls) == (None, 0)
    assert ended.expected_rises == pytest.approx(market_history(((0.0, False),), 10.0).expected_rises, rel=0.01)


def test_a_union_is_down_only_while_all_its_markets_are_known_to_be_down() -> None:
    lines = ((0.0, True), (10.0, False), (20.0, None)), ((5.0, False), (15.0, None))
    assert union(lines) == ((0.0, True), (10.0, False), (15.0, None))


def test_preempted_markets_have_a_higher_hazard_than_quiet_ones() -> None:
    often = line(*(own(400 * n, 400 * n + 30, is_preempted=True) for n in range(12)))
    never = line(*(own(400 * n, 400 * n + 300) for n in range(12)))
    assert often is not None
    assert never is not None
    assert market_history(often, NOW).fall_factor > 1.3
    assert market_history(never, NOW).fall_factor < 0.6
