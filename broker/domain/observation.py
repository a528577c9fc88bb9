"""What attempts showed of speed, memory and preemptions, for the estimates of later jobs."""

from dataclasses import dataclass

from broker.domain.ids import AttemptId
from broker.domain.workload import Plan, Workload


@dataclass(frozen=True, kw_only=True)
class RunObservation:
    """Names no team, person, model or data set, so that it may serve all teams of an installation."""

    attempt_id: AttemptId
    hardware: str
    """What computed, by its name in the hardware table."""
    plan: Plan
    nodes: int
    cores: int
    """Of one machine, where it computes on its CPU."""
    workload: Workload
    """Its model without a name."""
    tokens_per_s: float | None = None
    """Of all devices, over the last steps; None: there were too few."""
    peak_bytes: int | None = None
    """Of one device: what torch allocated at most; on a CPU what the process held. None: not known."""
    device_bytes: int = 0
    """What one device has; 0: not known."""
    out_of_memory: bool = False
    """It wanted more than `device_bytes`."""


@dataclass(frozen=True, kw_only=True)
class SpotHours:
    """What all teams' spot machines of one cloud, region and GPU went through together."""

    provider: str
    """Keeps a simulated cloud's apart from the cloud's own."""
    cloud: str
    region: str
    accelerator: str
    hours: float
    """For which they stood, or stand yet; of all nodes."""
    preemptions: int
