"""What goes over the wire of a job's costs beside its hours."""

from datetime import datetime
from decimal import Decimal
from typing import Literal

from broker.api.schemas.base import Wire

StoredKindView = Literal["artifacts", "checkpoints", "logs", "data"]


class ForecastView(Wire):
    """P50 of a running job's end, by its measured steps and the present price."""

    usd: Decimal
    """What it will have spent on machines by then."""
    finish_at: datetime
    step_s: float
    """Measured seconds of a step, with saves."""
    over_cap: bool
    """The cap does not suffice."""
    late: bool
    """It will miss its deadline, or its `max_duration`."""


class DeletedView(Wire):
    """A kind of data that is gone."""

    what: StoredKindView
    at: datetime


class StorageView(Wire):
    """What a job keeps in the blob store; charged beside its cap."""

    bytes: int
    usd: Decimal
    """Charged so far."""
    usd_per_month: Decimal
    """What it costs as it is now."""
    deleted: tuple[DeletedView, ...]
    """What was deleted, by its kind."""
