"""Measurements of attempts (speed, memory, preemptions) for the estimates of later jobs."""

from dataclasses import dataclass

from broker.domain.ids import AttemptId
from broker.domain.workload import Plan, Workload


@dataclass(frozen=True, kw_only=True)
class RunObservation:
    """Measurement of one attempt.

    It names no team, user, model or data set, so that it may serve all teams of an installation.
    """

    attempt_id: AttemptId
    hardware: str
    """Name in the hardware table of the device that computed."""
    plan: Plan
    nodes: int
    cores: int
    """Number of CPU cores of one machine, where it computes on its CPU."""
    workload: Workload
    """Workload whose model has no name."""
    tokens_per_s: float | None = None
    """Tokens/s of all devices over the last steps; None: there were too few steps."""
    peak_bytes: int | None = None
    """Peak bytes of one device: torch's peak allocation, or on a CPU the process's memory. None: not measured."""
    device_bytes: int = 0
    """Memory of one device; 0: unknown."""
    out_of_memory: bool = False
    """True when the job needed more than `device_bytes`."""


@dataclass(frozen=True, kw_only=True)
class SpotHours:
    """Total machine time and preemptions of all teams' spot machines of one cloud, region and GPU."""

    provider: str
    """Provider key; it separates a simulated cloud from the real one."""
    cloud: str
    region: str
    accelerator: str
    hours: float
    """Hours for which the machines existed or still exist; every node counts."""
    preemptions: int
