"""The plan's costs are consistent, and the guard of the deadline holds without it."""

from dataclasses import replace
from math import inf
from unittest.mock import patch

import pytest

from broker.estimator.spot_hazards import Timeline
from broker.quote.spot import policy
from broker.quote.spot.plan import CLASSES, PLANS, SpotAction, SpotPlan, SpotPlanCache, SpotPlanKey, no_plan
from broker.quote.spot.policy import Outlook, SpotOption, SpotSituation, may_try_spot, may_wait, outlook
from broker.simulation.production import ProductionPolicy
from broker.simulation.runs import SimulatedRun, follow
from broker.simulation.traces import Trace

KEY = SpotPlanKey(horizon_min=1440.0, slack_min=360.0, changeover_min=6.0, price=0.3, fall=0, rise=0)
ZONE, OTHER = ("p", "c", "zone", "gpu", 1, 1), ("p", "c", "other", "gpu", 1, 1)
UP, OLDEST_DOWN = 0, 2 * CLASSES - 1
HOUR = 60.0


def option(price: float = 0.3, *, is_for_sale: bool = True, other: bool = False) -> SpotOption:
    zone = OTHER if other else ZONE
    return SpotOption(offer_id=zone[2], market=zone, price=price, is_for_sale=is_for_sale)


def situation(*options: SpotOption, slack_min: float = 6 * HOUR, **changes: object) -> SpotSituation:
    case = SpotSituation(
        time_min=24 * HOUR, slack_min=slack_min, changeover_min=6.0, options=options, timelines={}, now_min=0.0
    )  # fmt: skip
    return replace(case, **changes)  # type: ignore[arg-type]


def built(key: SpotPlanKey) -> SpotPlan:
    return PLANS.get(key)


def planned(case: SpotSituation) -> Outlook:
    made = outlook(case)
    assert made is not None
    return made


def test_costs_lie_between_spot_and_on_demand_throughout() -> None:
    plan = built(KEY)
    for slack in (0.0, 60.0, 300.0):
        left_h = (1200.0 - slack) / 60
        demand = plan.cost(SpotAction.DEMAND, 1200.0, slack, UP)
        assert 0.3 * left_h <= demand <= left_h + 0.01
    assert plan.cost(SpotAction.DEMAND, 1200.0, 0.0, OLDEST_DOWN) == pytest.approx(20.0, abs=0.01)


def test_slack_saves_money_and_outages_cost_money() -> None:
    plan = built(KEY)
    by_slack = [plan.cost(SpotAction.DEMAND, 600.0 + slack, slack, UP) for slack in (0.0, 30.0, 120.0, 360.0)]
    assert by_slack == sorted(by_slack, reverse=True)
    by_age = [plan.cost(SpotAction.WAIT, 900.0, 300.0, CLASSES + age) for age in range(CLASSES)]
    assert by_age == sorted(by_age)


def test_no_work_costs_nothing_and_no_slack_forbids_a_wait() -> None:
    plan = built(KEY)
    assert plan.cost(SpotAction.SPOT, 60.0, 60.0, UP) == 0
    assert plan.cost(SpotAction.DEMAND, 60.0, -1.0, UP) == inf
    assert plan.cost(SpotAction.WAIT, 600.0, 300.0, UP) == inf
    assert plan.cost(SpotAction.WAIT, 600.0, 5.0, OLDEST_DOWN) == inf
    assert plan.cost(SpotAction.DEMAND, 5.0, 1.0, UP) < 0.25


def test_a_machine_that_is_lost_alone_costs_more() -> None:
    plan, alone = built(KEY), built(replace(KEY, alone=0.1))
    assert alone.cost(SpotAction.SPOT, 1200.0, 300.0, UP) > plan.cost(SpotAction.SPOT, 1200.0, 300.0, UP)


@pytest.mark.parametrize(("horizon_h", "slack_h", "changeover_min"), [(96, 48, 6.0), (96, 48, 30.0)])
def test_the_largest_plans_stay_small(horizon_h: int, slack_h: int, changeover_min: float) -> None:
    plan = SpotPlan(replace(KEY, horizon_min=horizon_h * 60.0, slack_min=slack_h * 60.0, changeover_min=changeover_min))
    assert plan.cells <= 100_000


def test_spot_is_bought_when_it_is_for_sale_and_cheap() -> None:
    made = planned(situation(option()))
    assert (made.action, made.offer_id, made.wait) == (SpotAction.SPOT, "zone", inf)


def test_a_job_waits_with_slack_and_buys_on_demand_without() -> None:
    assert planned(situation(option(is_for_sale=False))).action is SpotAction.WAIT
    assert planned(situation(option(is_for_sale=False), slack_min=15.0)).action is SpotAction.DEMAND


def test_a_job_on_demand_pays_no_second_start() -> None:
    case = situation(option(is_for_sale=False))
    stays = planned(replace(case, on_demand=True))
    assert stays.wait == inf
    assert stays.demand < planned(case).demand


def test_no_acceptable_spot_offer_leaves_nothing_to_decide() -> None:
    assert outlook(situation()) is None
    assert outlook(situation(option(0.95))) is None
    assert planned(situation(option(0.8))).offer_id == "zone"


def test_the_cheaper_zone_for_sale_is_bought() -> None:
    cheap, dear = option(0.2, is_for_sale=False), option(0.5, other=True)
    made = planned(situation(cheap, dear))
    assert (made.offer_id, made.action) == ("other", SpotAction.SPOT)
    assert planned(situation(replace(cheap, is_for_sale=True), dear)).offer_id == "zone"


def test_a_long_outage_ends_a_wait_sooner() -> None:
    def waits(timeline: Timeline) -> bool:
        case = situation(option(is_for_sale=False), slack_min=2 * HOUR, timelines={ZONE: timeline}, now_min=3000.0)
        return planned(case).action is SpotAction.WAIT

    assert waits(((0.0, True), (2995.0, False)))
    assert not waits(((0.0, False),))


def test_a_state_that_history_does_not_know_yet_counts() -> None:
    case = situation(option(), timelines={ZONE: ((0.0, False),)}, now_min=600.0)
    assert planned(case).action is SpotAction.SPOT


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_long_jobs_and_wide_slack_have_an_outlook(scale: float) -> None:
    case = situation(option(is_for_sale=False), time_min=scale * 240 * HOUR, slack_min=scale * 80 * HOUR)
    made = planned(case)
    assert made.wait == pytest.approx(made.demand, rel=0.01)
    assert scale * 0.3 * 160 < made.demand < scale * 165


def test_guards_bind_at_two_changeovers_and_at_the_next_decision() -> None:
    long, short = situation(option(), changeover_min=30.0), situation(option(), changeover_min=3.0)
    assert [may_wait(replace(long, slack_min=slack)) for slack in (59.9, 60.0)] == [False, True]
    assert [may_wait(replace(short, slack_min=slack)) for slack in (12.9, 13.0)] == [False, True]
    assert [may_try_spot(replace(long, slack_min=slack)) for slack in (59.9, 60.0)] == [False, True]
    refused = planned(replace(long, slack_min=59.0))
    assert (refused.spot, refused.wait, refused.action) == (inf, inf, SpotAction.DEMAND)


def test_no_job_is_late_without_spot() -> None:
    ticks = 6 * 7
    zone = Trace(name="zone", tick_s=600, available=(False,) * ticks, spot_usd=(0.8,) * ticks, on_demand_usd=2.5)
    run = SimulatedRun(zones=[zone], work_s=5 * 3600, changeover_s=360)
    assert follow(ProductionPolicy(run), run)
    assert run.waits > 0


@pytest.mark.parametrize(
    ("late_min", "slack_min"),
    [(10.0, 12.0), (inf, 1.0)],
    ids=["guard off by one tick", "wait past the latest start"],
)
def test_mutants_of_the_guard_are_found(late_min: float, slack_min: float) -> None:
    """The guard holds where the plan would wait, and a guard that ends waits too late lets it."""

    def late(case: SpotSituation) -> bool:
        return may_wait(replace(case, slack_min=case.slack_min + late_min))

    case = situation(option(is_for_sale=False), slack_min=slack_min)
    with patch.object(SpotPlan, "cost", lambda plan, action, *state: 0.0 if action is SpotAction.WAIT else 1.0):
        assert planned(case).action is SpotAction.DEMAND
        with patch.object(policy, "may_wait", late):
            assert planned(case).action is SpotAction.WAIT


def test_without_a_plan_a_job_uses_spot_and_waits_for_it_within_the_guard() -> None:
    def unplanned(case: SpotSituation) -> SpotAction:
        return planned(replace(case, plans=no_plan)).action

    sold_out = situation(option(is_for_sale=False))
    assert unplanned(situation(option())) is SpotAction.SPOT
    assert unplanned(situation(option(), on_demand=True)) is SpotAction.SPOT
    assert unplanned(sold_out) is SpotAction.WAIT
    assert unplanned(replace(sold_out, on_demand=True)) is SpotAction.DEMAND
    for case in (situation(option()), sold_out):
        assert unplanned(replace(case, slack_min=11.9)) is SpotAction.DEMAND
    assert unplanned(situation(option(0.85), time_min=HOUR, slack_min=30.0, changeover_min=10.0)) is SpotAction.SPOT


def test_plans_are_shared_and_the_oldest_dropped_by_their_size() -> None:
    keys = [replace(KEY, fall=fall) for fall in range(4)]
    cells = SpotPlan(KEY).cells
    cache = SpotPlanCache(most_cells=2 * cells)
    first, second = cache.get(keys[0]), cache.get(keys[1])
    assert cache.get(keys[0]) is first
    cache.get(keys[2])  # drops the second, which was used before the first
    assert cache.get(keys[0]) is first
    assert cache.get(keys[1]) is not second
    large = SpotPlanCache(most_cells=cells - 1)
    assert large.get(KEY) is large.get(KEY), "one plan is always kept"
    large.add(SpotPlan(KEY))  # built twice, by two threads
    assert large.get(KEY) is large.get(KEY)


def test_a_plan_of_another_process_is_the_same() -> None:
    plan, copy = built(KEY), SpotPlan(KEY, SpotPlan(KEY).packed())
    for action in SpotAction:
        for state in (UP, CLASSES, OLDEST_DOWN):
            if state < CLASSES or action is not SpotAction.SPOT:
                assert plan.cost(action, 700.0, 123.0, state) == copy.cost(action, 700.0, 123.0, state)
