"""Spending reports on the wire."""

from datetime import datetime
from decimal import Decimal

from broker.api.schemas.base import Wire
from broker.domain.ids import AttemptId, JobId
from broker.domain.spending import SpendBy


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
