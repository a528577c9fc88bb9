"""How a job would run on an offer, what it would take, and why an attempt was bought."""

from decimal import Decimal

from broker.api.schemas.base import Wire
from broker.domain.offer import DropReason
from broker.domain.workload import Parallelism


class MemoryView(Wire):
    """Bytes of one device, by category."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    context: int
    peak: int
    required: int
    """Peak and context with the margin."""
    margin: float
    source: str
    correction: float = 1.0
    """What own runs make of the sum of the categories."""
    runs: int = 0
    """Own runs that this rests on."""


class PlanView(Wire):
    """How a job runs on one kind of machine; global batch = micro_batch x accumulation x devices."""

    parallelism: Parallelism
    devices: int
    micro_batch: int
    accumulation: int
    gradient_checkpointing: bool


class HoursView(Wire):
    """Parts of the expected time."""

    boot: float
    """From create to the agent's first beat, with the image."""
    load: float
    """Imports, weights and data."""
    training: float
    evaluation: float
    checkpoints: float
    """For which training stands still, and the last upload."""
    preemptions: float
    """Work lost, and machines changed."""


class CostsView(Wire):
    """Parts of the expected dollars to finish."""

    machines: Decimal
    traffic: Decimal
    storage: Decimal
    """Of the bucket."""
    requests: Decimal


class ConsideredView(Wire):
    """One offer when an attempt was bought."""

    offer: str
    """Its id."""
    usd_per_hour: Decimal
    drop: DropReason | None = None
    """null: it was kept."""
    reason: str
    usd_p50: Decimal | None = None
    """Expected dollars to finish; null: dropped, or not known."""


class DecisionView(Wire):
    """Every offer of an attempt's market, as it was ranked."""

    items: tuple[ConsideredView, ...]
