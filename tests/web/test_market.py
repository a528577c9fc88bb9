"""The pages of offers, and of spending and budgets."""

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from broker.api.schemas.offers import OfferHistoryView, OfferSeriesView, PricePoint
from broker.api.service.offers import OfferHistoryService
from broker.domain.errors import Busy
from broker.domain.market.offer_history import BucketFigures, MarketGroup, OfferSample, bucket_of
from broker.web.pages.market import grouped
from broker.web.price_view import price_lines
from tests.api.harness import Running
from tests.support.machines import offer
from tests.web.seed import fill
from tests.web.visitor import Visitor


async def test_offers_are_grouped_filtered_and_explained(api: Running, ada: Visitor) -> None:
    page = (await ada.get("/ui/offers")).text
    assert "rtx4090" in page
    assert "l40s" in page
    assert "(simulated)" in page
    only = (await ada.get("/ui/offers?accelerator=l40s")).text
    assert "rtx4090" not in only
    assert "No offer matches" in (await ada.get("/ui/offers?provider=other")).text
    assert (await ada.get("/ui/offers?accelerator=%00")).status == 422
    api.market.items = []
    assert "Nothing is for sale" in (await ada.get("/ui/offers")).text


def test_the_price_of_a_group_is_of_one_gpu() -> None:
    sold = [
        offer(id="a", usd_per_hour=Decimal("3.00")),
        offer(id="b", usd_per_hour=Decimal("8.00"), gpus=8, spot=True, cloud="Other"),
    ]
    (group,) = grouped(sold)
    assert (group.spot, group.on_demand, group.clouds) == (Decimal(1), Decimal(3), ("Cloud", "Other"))


async def record(api: Running) -> None:
    """Record an hour of spot and on-demand prices of l40s at two clouds."""
    last = bucket_of(datetime.now(UTC)) - 1
    spot = MarketGroup("simulated", "alpha", "eu-1", "l40s", 1, True)
    figures = {
        spot: BucketFigures(8000, 9000, 50),
        spot._replace(cloud="beta", gpus=2): BucketFigures(14000, 14000, 25),
        spot._replace(spot=False): BucketFigures(19000, 19000, None),
    }
    for bucket in range(last - 11, last + 1):
        sample = OfferSample(provider="simulated", bucket=bucket, figures=figures)
        assert await api.service.store.record_offers([sample]) == [True]


async def test_a_chosen_gpu_has_a_price_line_for_each_market(api: Running, ada: Visitor) -> None:
    assert "Choose a GPU above for its lowest price" in (await ada.get("/ui/offers")).text
    await record(api)
    page = (await ada.get("/ui/offers?accelerator=l40s")).text
    spot, on_demand = re.findall(r"<figcaption>(.*)</figcaption>", page)
    assert spot == "<b>Spot</b>: now 0.7000, from 0.7000 to 0.7000; for sale 50 % of the time"
    assert on_demand.startswith("<b>On demand</b>: now 1.90, ")
    assert "availability not reported" in on_demand
    assert re.search(r'<path class="price" d="M[\d.]+ 50\.0H', page)
    assert str(datetime.now(UTC).date()) in page
    only = (await ada.get("/ui/offers?accelerator=l40s&cloud=alpha&market=spot")).text
    assert re.findall(r"now ([\d.]+)", only) == ["0.8000"]
    assert "on demand</td>" not in only


async def test_without_recorded_prices_the_page_says_what_to_do(
    api: Running, ada: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await record(api)
    empty = (await ada.get("/ui/offers?accelerator=rtx4090")).text
    assert "No price of these offers was recorded in the last 7 days" in empty
    gone = (await ada.get("/ui/offers?accelerator=l40s&market=spot&provider=other")).text
    assert "No offer matches" in gone
    assert "now 0.7000" in gone
    wrong = await ada.get("/ui/offers?market=cheap")
    assert (wrong.status, "market: " in wrong.text) == (422, True)
    many = "&".join(f"accelerator=l{number}" for number in range(9))
    assert "Choose at most 8 kinds of GPU" in (await ada.get(f"/ui/offers?{many}")).text

    async def busy(*_: object) -> OfferHistoryView:
        raise Busy("the checks took more than 10 s; try again")

    monkeypatch.setattr(OfferHistoryService, "history", busy)
    slow = await ada.get("/ui/offers?accelerator=l40s")
    assert (slow.status, "more than 10 s; try again" in slow.text) == (200, True)


def test_price_lines_have_gaps_levels_and_days() -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)

    def point(hour: int, usd: str | None, available: float | None) -> PricePoint:
        lowest = None if usd is None else Decimal(usd)
        return PricePoint(at=start + timedelta(hours=hour), lowest_usd=lowest, median_usd=lowest, available=available)

    def series(gpus: int, *points: PricePoint) -> OfferSeriesView:
        return OfferSeriesView(
            provider="p", cloud="c", region="r", accelerator="l4", gpus=gpus, spot=True, points=points
        )

    single = series(1, point(0, "1", 1.0), point(1, "2", 0.5), point(3, None, 0.0), point(30, "1", None))
    double = series(2, point(1, "3", 0.25), point(30, "4", 0.5))
    history = OfferHistoryView(
        since=start, until=start + timedelta(hours=40), step_s=3600, total=2, items=(single, double)
    )
    (line,) = price_lines(history)
    assert (line.lowest, line.highest, line.latest) == (Decimal(1), Decimal("1.5"), Decimal(1))
    assert line.path == "M0.0 100.0H25.0V0.0H50.0M750.0 100.0H775.0"
    assert line.strip == "M0.0 10V0.0H25.0V10zM25.0 10V5.0H50.0V10z"
    assert line.known == "M0.0 10V0.0H25.0V10zM25.0 10V0.0H50.0V10zM75.0 10V0.0H100.0V10z"
    assert [(str(day.day), day.usd, day.available) for day in line.days] == [
        ("2026-01-02", Decimal(1), None),
        ("2026-01-01", Decimal(1), 0.5),
    ]
    assert price_lines(history.model_copy(update={"items": ()})) == ()


async def test_spending_is_by_group_and_only_of_the_own_team(api: Running, ada: Visitor) -> None:
    await fill(api.service.store, None, api.service.clock.now())
    page = (await ada.get("/ui/spend?by=gpu")).text
    assert "rtx4090" in page
    assert "No budget limits this team" in page
    assert 'href="/ui/jobs/' in (await ada.get("/ui/spend")).text
    async with Visitor(api) as bob:
        await bob.sign_in(await api.token("bob", team="other"))
        assert "Nothing was spent in this time" in (await bob.get("/ui/spend?by=gpu")).text


async def test_a_wrong_window_is_refused_next_to_its_field(ada: Visitor) -> None:
    answer = await ada.get("/ui/spend?since=2026-02-01T00:00:00Z&until=2026-01-01T00:00:00Z")
    assert answer.status == 422
    assert 'id="fault-since"' in answer.text


async def test_calibration_is_shown_only_of_the_own_team(api: Running, ada: Visitor) -> None:
    await fill(api.service.store, None, api.service.clock.now())
    page = (await ada.get("/ui/spend/calibration")).text
    assert "l40s (simulated)" in page
    assert "1 of 1" in page
    assert '/ui/spend/calibration"' in (await ada.get("/ui/spend")).text
    async with Visitor(api) as bob:
        await bob.sign_in(await api.token("bob", team="other"))
        assert "No job finished in this time" in (await bob.get("/ui/spend/calibration")).text
    answer = await ada.get("/ui/spend/calibration?since=2026-02-01T00:00:00Z&until=2026-01-01T00:00:00Z")
    assert answer.status == 422
    assert 'id="fault-since"' in answer.text


async def test_a_budget_is_shown_with_its_limit(api: Running, ada: Visitor) -> None:
    policy = {"budgets": [{"limit_usd": "50", "per": "month"}]}
    boss = await api.token("boss", "read", "manage")
    await api.call("PUT", "/v1/policies/monthly", boss, 200, json={"name": "monthly", "team": "default", **policy})
    assert "50.00" in (await ada.get("/ui/spend")).text
