"""Facts about payments and about the forecasts of finished jobs.

They serve `gpubroker spend`, the reconciliation with a cloud's invoice, `gpubroker calibration` and quotes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Literal

from broker.domain.ids import AttemptId, JobId
from broker.domain.job import Attempt
from broker.domain.money import ZERO, LedgerCategory

if TYPE_CHECKING:  # the command line reads these types of reports only
    from broker.domain.workload import MemoryNeed, SpeedTier

SpendBy = Literal["job", "user", "team", "cloud", "gpu", "day", "month"]
CalibrationBy = Literal["tier", "gpu", "recipe", "family"]
MAX_FINISHED = 1000
"""Number of latest finished jobs that a report reads."""
FEW = 20
"""Least number of jobs whose share is shown as a percentage; of fewer jobs the counts are shown."""
UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class SpendWindow:
    """Charges written in [since, until); days are those of `zone` (IANA)."""

    since: datetime
    until: datetime
    zone: str = "UTC"


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Sum of the charges for one attempt, or for the storage of one job, on one local day."""

    job_id: JobId
    attempt_id: AttemptId | None
    """None: storage, which outlives attempts."""
    category: LedgerCategory
    day: date
    usd: Decimal


@dataclass(frozen=True, kw_only=True)
class PaidJob:
    """Name, team and owner of a job that was charged."""

    name: str
    team: str
    owner: str


@dataclass(frozen=True, kw_only=True)
class PaidAttempt:
    """A paid attempt with its price comparison at the time of purchase."""

    attempt: Attempt
    compute_usd: Decimal
    """Compute charges of its whole life, including those outside of the window."""
    dearest_usd: Decimal | None = None
    """Expected dollars to finish on the most expensive offer that the quote kept; None: no time was known."""


@dataclass(frozen=True, kw_only=True)
class Paid:
    """All facts of a spending report."""

    slices: Sequence[Slice]
    attempts: Mapping[AttemptId, PaidAttempt]
    """Every attempt that a slice names."""
    jobs: Mapping[JobId, PaidJob]


@dataclass(frozen=True, kw_only=True)
class SpendRow:
    """One group of a report, or its total."""

    key: str
    usd: Decimal = ZERO
    compute_usd: Decimal = ZERO
    egress_usd: Decimal = ZERO
    storage_usd: Decimal = ZERO
    lost_usd: Decimal = ZERO
    """Part of `compute_usd` without progress: machines that never trained, steps that had to be repeated."""
    machine_hours: float = 0.0
    gpu_hours: float = 0.0
    on_demand_usd: Decimal = ZERO
    """Cost of the useful hours on demand at the same cloud, where that price is known."""
    on_demand_of_usd: Decimal = ZERO
    """Part of `compute_usd` to which `on_demand_usd` compares."""
    dearest_usd: Decimal = ZERO
    """Expected cost of the same work on the most expensive kept offer, where a quote stated it."""
    dearest_of_usd: Decimal = ZERO
    """Part of `compute_usd` to which `dearest_usd` compares."""
    jobs: int = 0
    attempts: int = 0

    @property
    def saved_on_demand_usd(self) -> Decimal:
        """Dollars saved against on-demand; negative if lost work cost more."""
        return self.on_demand_usd - self.on_demand_of_usd

    @property
    def saved_dearest_usd(self) -> Decimal:
        """Dollars saved against the most expensive kept offer; negative if lost work cost more."""
        return self.dearest_usd - self.dearest_of_usd


@dataclass(frozen=True, kw_only=True)
class SpendReport:
    by: SpendBy
    rows: tuple[SpendRow, ...]
    """Rows by descending cost; days and months in their order."""
    total: SpendRow


@dataclass(frozen=True, kw_only=True)
class FinishedJob:
    """Quote and result of a job that succeeded.

    The quote is that of the first attempt whose agent sent a heartbeat. The results begin with that attempt.
    """

    accelerator: str
    gpus: int
    """GPUs of one machine; 0: it computes on its CPU."""
    simulated: bool
    emulated: bool
    """True when another machine computed in place of the GPU, so that its memory says nothing about the estimate."""
    family: str
    """`model_type` of the model; empty: unknown."""
    method: str
    task: str
    tier: "SpeedTier | None"
    """None: the quote knew no speed."""
    usd_p50: Decimal | None
    usd_p90: Decimal | None
    bucket_usd: Decimal = ZERO
    """Part of both amounts for space and requests of the bucket, which `spent_usd` does not contain."""
    hours_p50: float | None
    hours_p90: float | None
    memory: "MemoryNeed | None"
    spent_usd: Decimal
    """Dollars charged for machines and traffic."""
    hours: float | None
    """Hours from the create to the end of work, with changes of machines; None: unknown."""
    peak_bytes: int | None = None
    """Peak allocation of one device in the quoted attempt; None: not measured."""
    out_of_memory: bool = False
    """True when the quoted attempt ran out of the memory that its quote judged."""


@dataclass(frozen=True, kw_only=True)
class ForecastRecord:
    """Results of one kind of forecast over a group of jobs."""

    judged: int = 0
    """Jobs with both a forecast and a result."""
    within: int = 0
    """Jobs of these whose result was at most the P90."""
    median_error: float | None = None
    """Median of |result / P50 - 1|; None: unknown."""


@dataclass(frozen=True, kw_only=True)
class CalibrationRow:
    """One group of jobs, or all of them."""

    by: CalibrationBy | Literal["all"]
    key: str
    jobs: int
    money: ForecastRecord
    time: ForecastRecord
    memory: ForecastRecord


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    rows: tuple[CalibrationRow, ...]
    """Groups by tier, GPU, recipe and family; of each the one with the most jobs first."""
    total: CalibrationRow


def within_text(judged: int, within: int) -> str:
    """Return the jobs within P90: as counts where they are few, as a percentage otherwise."""
    if not judged:
        return UNKNOWN
    return f"{within} of {judged}" if judged < FEW else f"{100 * within / judged:.0f} % of {judged}"


def error_text(median_error: float | None) -> str:
    """Return a median error as a percentage."""
    return UNKNOWN if median_error is None else f"{100 * median_error:.1f} %"
