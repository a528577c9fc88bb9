"""What was paid, for what: the facts behind `gpubroker spend` and the reconciliation with a cloud's invoice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Literal

from broker.domain.ids import AttemptId, JobId
from broker.domain.job import Attempt, LedgerCategory
from broker.domain.money import ZERO

SpendBy = Literal["job", "user", "team", "cloud", "gpu", "day", "month"]


@dataclass(frozen=True, kw_only=True)
class SpendWindow:
    """Charges written in [since, until); days are those of `zone` (IANA)."""

    since: datetime
    until: datetime
    zone: str = "UTC"


@dataclass(frozen=True, kw_only=True)
class Slice:
    """All that one attempt, or the storage of one job, was charged on one local day."""

    job_id: JobId
    attempt_id: AttemptId | None
    """None: storage, which outlives attempts."""
    category: LedgerCategory
    day: date
    usd: Decimal


@dataclass(frozen=True, kw_only=True)
class PaidJob:
    """Whose money it was."""

    name: str
    team: str
    owner: str


@dataclass(frozen=True, kw_only=True)
class PaidAttempt:
    """What was bought for it, with what it was compared to when it was."""

    attempt: Attempt
    compute_usd: Decimal
    """Of its whole life, also outside of the window."""
    dearest_usd: Decimal | None = None
    """Expected dollars to finish on the dearest offer that the quote kept; None where no time was known."""


@dataclass(frozen=True, kw_only=True)
class Paid:
    """Everything that a report is made of."""

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
    """Part of `compute_usd` that bought no progress: machines that never trained, steps that had to be redone."""
    machine_hours: float = 0.0
    gpu_hours: float = 0.0
    on_demand_usd: Decimal = ZERO
    """What the useful hours would have cost on demand at the same cloud, where that price is known."""
    on_demand_of_usd: Decimal = ZERO
    """The part of `compute_usd` that `on_demand_usd` is to be compared with."""
    dearest_usd: Decimal = ZERO
    """What the same work was expected to cost on the dearest offer that was kept, where a quote said so."""
    dearest_of_usd: Decimal = ZERO
    jobs: int = 0
    attempts: int = 0

    @property
    def saved_on_demand_usd(self) -> Decimal:
        """May be negative: lost work is counted as cost."""
        return self.on_demand_usd - self.on_demand_of_usd

    @property
    def saved_dearest_usd(self) -> Decimal:
        """May be negative, likewise."""
        return self.dearest_usd - self.dearest_of_usd


@dataclass(frozen=True, kw_only=True)
class SpendReport:
    by: SpendBy
    rows: tuple[SpendRow, ...]
    """Dearest first; days and months in their order."""
    total: SpendRow
