"""Facts about payments, for `gpubroker spend` and for the reconciliation with a cloud's invoice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Literal

from broker.domain.ids import AttemptId, JobId
from broker.domain.job import Attempt
from broker.domain.money import ZERO, LedgerCategory

SpendBy = Literal["job", "user", "team", "cloud", "gpu", "day", "month"]


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
