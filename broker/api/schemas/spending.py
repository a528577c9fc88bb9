"""Spending over the wire."""

from datetime import datetime
from decimal import Decimal

from broker.api.schemas.base import Wire
from broker.domain.ids import AttemptId, JobId
from broker.domain.spending import SpendBy


class SpendRowView(Wire):
    """One group; see docs/guide/caps-and-budgets.md for how each figure is made."""

    key: str
    usd: Decimal
    compute_usd: Decimal
    egress_usd: Decimal
    storage_usd: Decimal
    lost_usd: Decimal
    """Part of compute that bought no progress."""
    machine_hours: float
    gpu_hours: float
    on_demand_usd: Decimal
    """What the useful hours would have cost on demand at the same cloud, where that price is known."""
    on_demand_of_usd: Decimal
    """The part of compute that this is compared with."""
    saved_on_demand_usd: Decimal
    dearest_usd: Decimal
    """The same work on the dearest offer that was kept, where a quote said so."""
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
    """Dearest first; days and months in their order."""
    total: SpendRowView


class ChargeView(Wire):
    """What the ledger has for one machine within the window; its attempt's charges, divided by its machines."""

    machine: str
    """The cloud's id; empty where it never had one."""
    kind: str
    """Its type, as the cloud names it."""
    usd: Decimal
    job_id: JobId
    attempt_id: AttemptId


class ChargeList(Wire):
    cloud: str
    since: datetime
    until: datetime
    items: tuple[ChargeView, ...]
