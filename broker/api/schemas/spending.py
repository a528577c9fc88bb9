"""Spending reports, and the record of forecasts, on the wire."""

from datetime import datetime
from decimal import Decimal
from typing import Literal

from broker.api.schemas.base import Wire
from broker.domain.ids import AttemptId, JobId
from broker.domain.spending import CalibrationBy, SpendBy


class SpendRowView(Wire):
    """Totals of one group; see docs/guide/caps-and-budgets.md for each figure."""

    key: str
    usd: Decimal
    compute_usd: Decimal
    egress_usd: Decimal
    storage_usd: Decimal
    lost_usd: Decimal
    """Part of compute that produced no progress."""
    machine_hours: float
    gpu_hours: float
    on_demand_usd: Decimal
    """Cost of the useful hours on demand at the same cloud, if that price is known."""
    on_demand_of_usd: Decimal
    """Part of compute that `on_demand_usd` is compared with."""
    saved_on_demand_usd: Decimal
    dearest_usd: Decimal
    """Cost of the same work on the most expensive kept offer, if the quote recorded one."""
    dearest_of_usd: Decimal
    saved_dearest_usd: Decimal
    jobs: int
    attempts: int


class SpendView(Wire):
    by: SpendBy
    since: datetime
    until: datetime
    zone: str
    rows: tuple[SpendRowView, ...]
    """Groups, most expensive first; days and months in their order."""
    total: SpendRowView


class ChargeView(Wire):
    """Charges of one machine within the window: its attempt's charges, divided by its machines."""

    machine: str
    """The cloud's id of the machine; empty: it never had one."""
    kind: str
    """Machine type, as the cloud names it."""
    usd: Decimal
    job_id: JobId
    attempt_id: AttemptId


class ChargeList(Wire):
    cloud: str
    since: datetime
    until: datetime
    items: tuple[ChargeView, ...]


class ForecastRecordView(Wire):
    """Results of one kind of forecast over a group of jobs."""

    judged: int
    """Jobs with both a forecast and a result."""
    within: int
    """Jobs of these whose result was at most the P90. For memory: at most the size that the quote required."""
    median_error: float | None
    """Median of |result / P50 - 1|; null: unknown."""


class CalibrationRowView(Wire):
    """One group of finished jobs, or all of them."""

    by: CalibrationBy | Literal["all"]
    key: str
    """Name of the group; `unknown` where the quote did not know it."""
    jobs: int
    money: ForecastRecordView
    time: ForecastRecordView
    memory: ForecastRecordView


class CalibrationView(Wire):
    since: datetime
    until: datetime
    rows: tuple[CalibrationRowView, ...]
    """Groups by tier of evidence, GPU, recipe and family; of each the one with the most jobs first."""
    total: CalibrationRowView
