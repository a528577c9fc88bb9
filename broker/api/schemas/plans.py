"""Memory, plan, time and cost of a job on an offer, and the offers considered for an attempt."""

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
    """Factor learned from own runs that was applied to the sum of the categories."""
    runs: int = 0
    """Own runs that the factor is based on."""


class PlanView(Wire):
    """Execution plan on one kind of machine. Global batch = micro_batch x accumulation x devices."""

    parallelism: Parallelism
    devices: int
    micro_batch: int
    accumulation: int
    gradient_checkpointing: bool


class HoursView(Wire):
    """Parts of the expected time, in hours."""

    boot: float
    """Hours from create to the agent's first heartbeat, including the image."""
    load: float
    """Hours for imports, weights and data."""
    training: float
    evaluation: float
    checkpoints: float
    """Hours during which training pauses for checkpoints, and the last upload."""
    preemptions: float
    """Hours of work lost by preemptions, and of replacing machines."""


class CostsView(Wire):
    """Parts of the expected dollars to finish."""

    machines: Decimal
    traffic: Decimal
    storage: Decimal
    """Dollars for the bucket."""
    requests: Decimal


class ConsideredOffer(Wire):
    """One offer at the purchase of an attempt."""

    offer: str
    """Id of the offer."""
    usd_per_hour: Decimal
    drop: DropReason | None = None
    """Reason for dropping the offer; null: it was kept."""
    reason: str
    usd_p50: Decimal | None = None
    """Expected dollars to finish; null: dropped, or not known."""


class DecisionView(Wire):
    """Every offer of an attempt's market, in the order of the ranking."""

    items: tuple[ConsideredOffer, ...]
