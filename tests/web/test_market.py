"""The pages of offers, and of spending and budgets."""

from decimal import Decimal

from broker.web.pages.market import grouped
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
