"""Forecast and stored data of a job on the wire."""

from datetime import datetime
from decimal import Decimal
from typing import Literal

from broker.api.schemas.base import Wire

StoredKindView = Literal["artifacts", "checkpoints", "logs", "data"]


class ForecastIntervalView(Wire):
    """90 % interval of a forecast, from the first 20 steps on the machine and later ones."""

    usd_low: Decimal
    usd_high: Decimal
    finish_earliest: datetime
    finish_latest: datetime


class ForecastView(Wire):
    """P50 forecast of a running job's end, from its measured steps and the current price."""

    usd: Decimal
    """Dollars for machines that the job will have spent by then."""
    finish_at: datetime
    step_s: float
    """Measured seconds per step, including saves."""
    over_cap: bool
    """True if the cap will not suffice."""
    late: bool
    """True if the job will miss its deadline or its `max_duration`."""
    interval: ForecastIntervalView | None = None
    """Null: fewer than 20 steps were measured."""


class JobMachineView(Wire):
    """Machines of a job's latest attempt."""

    accelerator: str
    gpus: int
    """GPUs of each machine."""
    nodes: int
    """Number of machines that were bought together."""
    cloud: str
    region: str
    spot: bool
    simulated: bool
    """True: no real money, no real cloud."""


class DeletedView(Wire):
    """A deleted kind of data."""

    what: StoredKindView
    at: datetime


class StorageView(Wire):
    """Stored data of a job in the blob store. It is charged in addition to the cap."""

    bytes: int
    """Size at `measured_at`; later checkpoints are not included."""
    measured_at: datetime
    usd: Decimal
    """Dollars charged so far."""
    usd_per_month: Decimal
    """Current cost in dollars per month."""
    deleted: tuple[DeletedView, ...]
    """Deleted data, by kind."""
