"""Expected cost of a wait, on-demand and spot, by time left and slack: the recursion behind spot decisions.

Slack is the time left minus the time that the remaining work takes on demand. A running machine keeps the slack, a
wait uses it up, and a start costs one changeover of it. Costs are in hours of on-demand. A plan belongs to no job: it
covers every time left and slack up to its horizon, so that jobs share plans. See `broker.quote.spot.policy`.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from math import ceil, inf
from threading import Lock
from typing import Final

from broker.estimator.spot_hazards import AGES_MIN, FACTOR_STEP, PRIOR_FALL, PRIOR_RISE, TICK_MIN, scaled

CLASSES: Final = len(AGES_MIN)
NEVER: Final = 1e12
"""Cost of an action that could miss the deadline."""
POSSIBLE: Final = 1e6
"""Costs above this contain a chance to miss the deadline."""
COLUMNS: Final = 120
"""Units into which the slack of a plan is divided at most, which bounds its seconds and bytes."""
CACHED_CELLS: Final = 1_500_000
"""Cells of time and slack of all plans that are kept, each of 128 bytes."""
ROWS: Final = 4 * CLASSES
"""Costs of a cell: a wait and spot by age class, on-demand by the age class of both states."""

Column = list[float]
"""Costs by units of slack."""
Columns = list[Column]
"""Costs by age class of the market's state."""


class SpotAction(IntEnum):
    """Choice of a job until the next decision."""

    WAIT = 0
    DEMAND = 1
    SPOT = 2


@dataclass(frozen=True, kw_only=True)
class SpotPlanKey:
    """Everything on which a plan depends."""

    horizon_min: float
    slack_min: float
    changeover_min: float
    price: float
    """Price of spot divided by that of on-demand, for the same work."""
    fall: int
    """Frailty of an available market in steps of `FACTOR_STEP`."""
    rise: int
    """Frailty of an unavailable market in the same steps."""
    alone: float = 0.0
    """Chance in ten minutes to lose a spot machine although the union of zones stays up."""


@dataclass(frozen=True)
class _PlanValues:
    """Costs from one tick on, by what the job has and by the age class of an available or unavailable market."""

    idle_up: Columns
    idle_down: Columns
    demand_up: Columns
    demand_down: Columns
    spot: Columns


_FIRST_ROW: Final = {SpotAction.WAIT: 0, SpotAction.DEMAND: CLASSES, SpotAction.SPOT: 3 * CLASSES}


class PlanNotReady(Exception):
    """Raised by a source that never builds a plan itself."""

    def __init__(self, key: SpotPlanKey) -> None:
        super().__init__(f"the plan of {key} is not built yet")
        self.key = key


class SpotPlan:
    """Table of the expected cost of each action."""

    def __init__(self, key: SpotPlanKey, packed: bytes = b"") -> None:
        """Compute the table. `packed`: the table as another process has computed it; empty: it has not."""
        self.key = key
        self._unit_min = max(key.changeover_min, key.slack_min / COLUMNS)
        self._size = ceil(key.slack_min / self._unit_min) + 2
        self._ticks = ceil(key.horizon_min / TICK_MIN) + 1
        self._older = [*(min(1.0, TICK_MIN / (last - first)) for first, last in pairwise(AGES_MIN)), 0.0]
        """Chance to reach the next age class in a tick."""
        self._costs = array("f", packed)
        """Costs by tick, row and unit of slack."""
        if not packed:
            self._fill_tables()

    @property
    def cells(self) -> int:
        """Return the number of cells of time and slack; each holds 32 costs."""
        return self._ticks * self._size

    def packed(self) -> bytes:
        """Return the table for another process of this machine."""
        return self._costs.tobytes()

    def _fill_tables(self) -> None:
        falls, rises = scaled(PRIOR_FALL, FACTOR_STEP**self.key.fall), scaled(PRIOR_RISE, FACTOR_STEP**self.key.rise)
        no_costs: Columns = [[0.0] * self._size] * CLASSES
        after = _PlanValues(no_costs, no_costs, no_costs, no_costs, no_costs)
        for tick in range(1, self._ticks + 1):
            done_units = min(self._size, ceil(tick * TICK_MIN / self._unit_min))
            actions = self._actions(after, tick, done_units, falls, rises)
            for columns in actions:
                for column in columns:
                    self._costs.extend(column)
            after = self._best(done_units, *actions)

    def _actions(
        self, after: _PlanValues, tick: int, done_units: int, falls: Sequence[float], rises: Sequence[float]
    ) -> tuple[Columns, Columns, Columns]:
        """Return the costs of a wait for an unavailable market, of on-demand by both states, and of spot.

        `done_units`: units of slack from which on no work is left.
        """
        time_min, unit_min, alone = tick * TICK_MIN, self._unit_min, self.key.alone
        hours = [min(TICK_MIN, max(0.0, time_min - slack * unit_min)) / 60 for slack in range(self._size)]
        paid = [self.key.price * billed_hours for billed_hours in hours]
        free = [0.0] * self._size
        wait = self._next_costs(after.idle_down, rises, after.idle_up[0], free)
        spot_costs = after.spot
        if alone:
            spot_costs = [
                _mix(alone, lost_column, stays) for lost_column, stays in zip(after.idle_up, after.spot, strict=True)
            ]
        return (
            [self._zero_after_end(_later(column, TICK_MIN / unit_min, 0.0), done_units) for column in wait],
            self._next_costs(after.demand_up, falls, after.demand_down[0], hours)
            + self._next_costs(after.demand_down, rises, after.demand_up[0], hours),
            [
                self._zero_after_end(column, done_units)
                for column in self._next_costs(spot_costs, falls, after.idle_down[0], paid)
            ],
        )

    def _next_costs(self, stays: Columns, rates: Sequence[float], other: Column, paid: Column) -> Columns:
        """Return the costs by age class if the market changes to `other` at `rates`, and ages otherwise."""
        columns = []
        for number, rate in enumerate(rates):
            older, rest = self._older[number], 1 - rate
            if older in (0.0, 1.0):
                same = stays[number + (older == 1.0)]
                columns.append([rate * x + rest * y + z for x, y, z in zip(other, same, paid, strict=True)])
                continue
            old_share, young_share = rest * older, rest * (1 - older)
            rows = zip(other, stays[number + 1], stays[number], paid, strict=True)
            columns.append([rate * x + old_share * y + young_share * z + cost for x, y, z, cost in rows])
        return columns

    def _best(self, done_units: int, wait: Columns, demand: Columns, spot: Columns) -> _PlanValues:
        """Return the costs of the best action with each machine; a new machine costs a changeover."""
        demand_up, demand_down = demand[:CLASSES], demand[CLASSES:]
        to_demand = [self._started(column, 1.0) for column in (*demand_up, *demand_down)]
        to_spot = [self._started(column, self.key.price) for column in spot]
        idle_up = [list(map(min, *columns)) for columns in zip(to_demand[:CLASSES], to_spot, strict=True)]
        idle_down = [list(map(min, *columns)) for columns in zip(to_demand[CLASSES:], wait, strict=True)]
        return _PlanValues(
            idle_up=[self._zero_after_end(column, done_units) for column in idle_up],
            idle_down=[self._zero_after_end(column, done_units) for column in idle_down],
            demand_up=[list(map(min, *columns)) for columns in zip(demand_up, to_spot, strict=True)],
            demand_down=demand_down,
            spot=spot,
        )

    def _started(self, column: Column, price: float) -> Column:
        """Return the costs of starting a machine, which needs a changeover of slack and is paid for it."""
        changeover_min = self.key.changeover_min
        return _later(column, changeover_min / self._unit_min, price * changeover_min / 60)

    def _zero_after_end(self, column: Column, done_units: int) -> Column:
        """Return the column with zero costs where no work is left."""
        return column if done_units >= self._size else [*column[:done_units], *([0.0] * (self._size - done_units))]

    def cost(self, action: SpotAction, time_min: float, slack_min: float, state: int) -> float:
        """Return the expected cost of an action that is under way, infinity if it could miss the deadline.

        `state`: age class of an available market, or `CLASSES` plus the class of an unavailable one. A wait for an
        available market is never planned.
        """
        if action is SpotAction.WAIT:
            state -= CLASSES
        if slack_min < 0 or state < 0:
            return inf
        if slack_min >= time_min:
            return 0.0
        tick, values = min(self._ticks, max(1.0, time_min / TICK_MIN)), self._costs
        low = min(self._ticks - 1, int(tick))
        column, part = int(slack_min / self._unit_min), slack_min / self._unit_min % 1
        later = (low * ROWS + _FIRST_ROW[action] + state) * self._size + min(self._size - 2, column)
        cost = 0.0
        for weight, place in ((low + 1 - tick, later - ROWS * self._size), (tick - low, later)):
            if weight:
                cost += weight * ((1 - part) * values[place] + (part * values[place + 1] if part else 0.0))
        return cost if cost < POSSIBLE else inf


def _mix(share: float, columns: Column, others: Column) -> Column:
    rest = 1 - share
    return [share * x + rest * y for x, y in zip(columns, others, strict=True)]


def _later(column: Column, units: float, paid: float) -> Column:
    """Return the costs after `units` of slack are used for `paid`; with less slack the cost is NEVER."""
    whole_units = int(units)
    if whole_units == units:
        return [*([NEVER] * whole_units), *[cost + paid for cost in column[: len(column) - whole_units]]]
    part, rest = units - whole_units, 1 - units + whole_units
    pairs = zip(column[1:], column[: len(column) - whole_units - 1], strict=False)
    return [*([NEVER] * (whole_units + 1)), *[rest * more + part * less + paid for more, less in pairs]]


class SpotPlanCache:
    """Plans by key, for several threads. The least recently used ones go once all have more than `CACHED_CELLS`."""

    def __init__(self, most_cells: int = CACHED_CELLS) -> None:
        self._most_cells = most_cells
        self._plans: dict[SpotPlanKey, SpotPlan] = {}
        self._cells = 0
        self._lock = Lock()

    def get(self, key: SpotPlanKey) -> SpotPlan:
        """Return the plan of a key, which is computed if it is not kept."""
        plan = self.find(key)
        if plan is None:
            self.add(plan := SpotPlan(key))
        return plan

    def find(self, key: SpotPlanKey) -> SpotPlan | None:
        """Return the plan of a key; None: it is not kept."""
        with self._lock:
            plan = self._plans.pop(key, None)
            if plan is not None:
                self._plans[key] = plan
            return plan

    def add(self, plan: SpotPlan) -> None:
        """Keep a plan, and drop the least recently used ones beyond `CACHED_CELLS`."""
        with self._lock:
            if plan.key not in self._plans:
                self._plans[plan.key] = plan
                self._cells += plan.cells
            while self._cells > self._most_cells and len(self._plans) > 1:
                self._cells -= self._plans.pop(next(iter(self._plans))).cells


PLANS: Final = SpotPlanCache()
PlanSource = Callable[[SpotPlanKey], SpotPlan | None]
"""Returns the plan of a key; None: there is none, and the policy decides without a model. May raise PlanNotReady."""


def plan_for(key: SpotPlanKey) -> SpotPlan | None:
    """Return the plan of a key; jobs share it."""
    return PLANS.get(key)


def no_plan(key: SpotPlanKey) -> SpotPlan | None:
    """Return None, for a quote whose reader needs no outlook."""
