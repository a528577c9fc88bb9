"""Decides between waiting for spot, on-demand and spot for a job with a deadline, by the plan of its market.

`outlook` compares the expected costs of all three. The acceptable spot offers count as one market, their union: it is
up while any of them is for sale. The guard of the deadline holds without a model: see `SpotSituation`. Without a plan
the job is on spot while spot is for sale, and waits for it as long as the guard allows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, log
from typing import Final

from broker.estimator.spot_hazards import (
    PRIOR_FALL,
    TICK_MIN,
    UNKNOWN_AGE_MIN,
    Market,
    MarketHistory,
    Timeline,
    age_class,
    lifetime_min,
    market_history,
    rounded_factor,
    scaled,
    union,
)
from broker.quote.spot.plan import CLASSES, PlanSource, SpotAction, SpotPlan, SpotPlanKey, plan_for

ACCEPTABLE_SHARE: Final = 0.6
"""Spot is acceptable up to this share of the on-demand price."""
CHEAPEST_SHARE: Final = 0.9
"""Spot is acceptable up to this share if no offer is below ACCEPTABLE_SHARE; then only the cheapest offer is."""
HORIZONS_H: Final = (6, 12, 24, 48, 72, 96)
SLACKS_H: Final = (3, 6, 12, 24, 48)
MIN_CHANGEOVER_MIN: Final = 3.0
CHANGEOVER_STEP: Final = 1.1
DEARER: Final = 1.25
"""The market counts as available only while its best offer costs at most this multiple of the usual price."""
PRICE_STEP: Final = 1.15
DECISION_MIN: Final = 10.0
"""Maximum minutes between two decisions about a waiting job."""


@dataclass(frozen=True, kw_only=True)
class SpotOption:
    """A spot offer that fits the job."""

    offer_id: str
    market: Market
    price: float
    """Price divided by that of on-demand, for the same work."""
    is_for_sale: bool


@dataclass(frozen=True, kw_only=True)
class SpotSituation:
    """A job, its time and its market."""

    time_min: float
    """Minutes until the deadline in which machines may work."""
    slack_min: float
    """Minutes that are left if the work is done on demand without another start, by the P90 of its duration."""
    changeover_min: float
    """Minutes without progress that a start costs, with the lost work of a preemption."""
    options: Sequence[SpotOption]
    timelines: Mapping[Market, Timeline]
    now_min: float
    """Time of the timelines' clock."""
    on_demand: bool = False
    """True if the job runs on demand."""
    plans: PlanSource = plan_for


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Expected costs to finish by the next choice, in hours of on-demand; infinity: it could miss the deadline."""

    wait: float
    demand: float
    spot: float
    offer_id: str
    """The best spot offer: for sale if any is."""

    @property
    def action(self) -> SpotAction:
        """Return the cheapest action; on-demand if all could miss the deadline."""
        if self.spot < min(self.wait, self.demand):
            return SpotAction.SPOT
        return SpotAction.WAIT if self.wait < self.demand else SpotAction.DEMAND


def outlook(case: SpotSituation) -> Outlook | None:
    """Return the expected costs of each action; None: no spot offer is cheaper than on-demand."""
    options = _acceptable(case.options)
    if not options:
        return None
    lives = [life_min(case.timelines, option.market, case.now_min) for option in options]
    history = _union_history(case, options)
    key = _key(case, options, lives, history)
    best, life = min(
        zip(options, lives, strict=True),
        key=lambda pair: (
            not pair[0].is_for_sale,
            pair[0].price * (1 + key.changeover_min / pair[1]),
            pair[0].offer_id,
        ),
    )
    plan = case.plans(key)
    return _unplanned(case, best, key) if plan is None else _planned(case, best, life, plan, history)


def _planned(case: SpotSituation, best: SpotOption, life: float, plan: SpotPlan, history: MarketHistory) -> Outlook:
    changeover = plan.key.changeover_min
    time_min, slack_min, scale = _plan_position(plan, case)
    up = age_class(history.age_min) if history.is_up else 0
    is_usual = history.is_up and best.price <= DEARER * plan.key.price
    state = up if is_usual else CLASSES + (0 if history.is_up else age_class(history.age_min))
    start = 0.0 if case.on_demand else changeover
    demand = plan.cost(SpotAction.DEMAND, time_min, slack_min - start, state) + start / 60
    wait = inf if case.on_demand or not may_wait(case) else plan.cost(SpotAction.WAIT, time_min, slack_min, state)
    spot = inf
    if best.is_for_sale and may_try_spot(case):
        rest_min = min(life, time_min - slack_min)
        spot = plan.cost(SpotAction.SPOT, time_min, slack_min - changeover, up)
        spot += (changeover * best.price + (best.price - plan.key.price) * rest_min) / 60
    lowest = min(wait, demand, spot)
    more = 0.0 if lowest == inf else lowest / scale - lowest  # what a plan of a shorter job leaves out
    return Outlook(wait=wait + more, demand=demand + more, spot=spot + more, offer_id=best.offer_id)


def _unplanned(case: SpotSituation, best: SpotOption, key: SpotPlanKey) -> Outlook:
    """Return the costs under the assumption that bought spot is never lost; only the guard ends a wait."""
    work_min, start = case.time_min - case.slack_min, 0.0 if case.on_demand else key.changeover_min
    on_spot = best.price * (work_min + key.changeover_min) / 60
    is_waiting = not (best.is_for_sale or case.on_demand)
    return Outlook(
        wait=on_spot if is_waiting and may_wait(case) else inf,
        demand=(work_min + start) / 60,
        spot=on_spot if best.is_for_sale and may_try_spot(case) else inf,
        offer_id=best.offer_id,
    )


def may_wait(case: SpotSituation) -> bool:
    """Return True if a wait until the next decision cannot make the job late: the guard of waits."""
    return case.slack_min >= max(2 * case.changeover_min, case.changeover_min + DECISION_MIN)


def may_try_spot(case: SpotSituation) -> bool:
    """Return True if a spot machine that is lost at once cannot make the job late: the guard of starts."""
    return case.slack_min >= 2 * case.changeover_min


def _acceptable(options: Sequence[SpotOption]) -> list[SpotOption]:
    """Return the options up to the acceptable price, or the cheapest one if there is none."""
    acceptable = [option for option in options if option.price <= ACCEPTABLE_SHARE]
    cheapest = min(options, key=lambda option: option.price, default=None)
    return acceptable or ([cheapest] if cheapest is not None and cheapest.price <= CHEAPEST_SHARE else [])


def life_min(timelines: Mapping[Market, Timeline], market: Market, now_min: float) -> float:
    """Return the expected minutes of a new machine of a market."""
    timeline = timelines.get(market)
    factor = market_history(timeline, now_min).fall_factor if timeline else 1.0
    return lifetime_min(scaled(PRIOR_FALL, factor), 0.0)


def _union_history(case: SpotSituation, options: Sequence[SpotOption]) -> MarketHistory:
    """Return the history of the union of options, in the state that is known now."""
    is_up = any(option.is_for_sale for option in options)
    timelines = {option.market: case.timelines[option.market] for option in options if option.market in case.timelines}
    if not timelines:
        return MarketHistory(is_up=is_up, age_min=UNKNOWN_AGE_MIN)
    history = market_history(union(tuple(timelines.values())), case.now_min)
    return history if history.is_up is is_up else history.after(0.0, is_up=is_up)


def _key(
    case: SpotSituation, options: Sequence[SpotOption], lives: Sequence[float], history: MarketHistory
) -> SpotPlanKey:
    weights = [option.price**-4 for option in options]
    total = sum(weights)
    price = sum(option.price * weight for option, weight in zip(options, weights, strict=True)) / total
    alone = 0.0
    if len(options) > 1:
        ends = sum(TICK_MIN / life * weight for life, weight in zip(lives, weights, strict=True)) / total
        alone = min(0.5, max(0.002, ends - scaled(PRIOR_FALL, history.fall_factor)[3]))
        alone = exp(round(2 * log(alone)) / 2)  # in steps, so that jobs share plans
    slack_h = next(hours for hours in SLACKS_H if min(case.slack_min, SLACKS_H[-1] * 60) <= hours * 60)
    slack = min(case.slack_min, slack_h * 60)
    changeover = max(MIN_CHANGEOVER_MIN, case.changeover_min)
    steps = ceil(log(changeover / MIN_CHANGEOVER_MIN) / log(CHANGEOVER_STEP) - 0.05)
    horizon = min(case.time_min - case.slack_min + slack, HORIZONS_H[-1] * 60)
    return SpotPlanKey(
        horizon_min=60.0 * next(hours for hours in HORIZONS_H if horizon <= hours * 60),
        slack_min=60.0 * slack_h,
        changeover_min=MIN_CHANGEOVER_MIN * CHANGEOVER_STEP**steps,
        price=min(0.95, PRICE_STEP ** round(log(price) / log(PRICE_STEP))),
        fall=rounded_factor(history.fall_factor),
        rise=rounded_factor(history.rise_factor),
        alone=alone,
    )


def _plan_position(plan: SpotPlan, case: SpotSituation) -> tuple[float, float, float]:
    """Return time and slack within the plan, and the scale of the time.

    Slack beyond the plan is left out. A longer job is planned as a shorter one with the same share of slack.
    """
    slack_min = min(case.slack_min, SLACKS_H[-1] * 60.0)
    time_min = case.time_min - case.slack_min + slack_min
    scale = min(1.0, plan.key.horizon_min / time_min)
    return time_min * scale, slack_min * scale, scale
