"""Facts on which the placement of a job depends, and the decision about it. See `broker.quote.job_placement`."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from functools import cached_property
from typing import Any

from broker.billing.drain import DrainBudget
from broker.domain.ids import Installation
from broker.domain.instance import Caps
from broker.domain.job import Attempt, Job
from broker.domain.money import ZERO, LedgerEntry
from broker.domain.offer import Offer, Quote
from broker.estimator.planning.corrections import Corrections
from broker.lifecycle.decisions.restored_decision import RestoredDecision
from broker.policy.budgets import Applied
from broker.quote.decision_record import packed
from broker.quote.placement import Choice
from broker.quote.spot.plan import PlanSource, plan_for


@dataclass(frozen=True, kw_only=True)
class PlacementSettings:
    """Properties of the installation on which every placement depends."""

    installation: Installation
    caps: Mapping[str, Caps]
    """Capabilities of each configured provider, by its name."""
    drain_budget: DrainBudget
    local_files: bool = False
    """True if the blob store is a folder of this host."""
    scoped_store: bool = True
    """True if the blob store can issue credentials that reach the files of one job only."""
    storage_usd_per_gib_month: Decimal = ZERO
    retry_s: float = 15.0
    """Seconds until a waiting job is quoted again."""


@dataclass(frozen=True, kw_only=True)
class SharedQuote:
    """Quote of the first of several jobs that do not differ in anything that a quote reads."""

    quote: Quote

    @cached_property
    def record(self) -> bytes:
        """Packed record of the quote."""
        return packed(self.quote)


class QuoteCache:
    """Quotes of one placement round, over the same offers."""

    def __init__(self) -> None:
        self._quotes: dict[Hashable, SharedQuote] = {}
        self._basis: tuple[object, ...] = ()

    def shared(self, basis: tuple[object, ...], key: Hashable, make: Callable[[], Quote]) -> SharedQuote:
        """Return the quote of `key`; `make` computes the first one.

        `basis`: objects that all quotes of the cache were computed from. If one was replaced, the cache is emptied.
        """
        if len(basis) != len(self._basis) or any(a is not b for a, b in zip(basis, self._basis, strict=True)):
            self._quotes, self._basis = {}, basis
        if (known := self._quotes.get(key)) is None:
            known = self._quotes[key] = SharedQuote(quote=make())
        return known


@dataclass(frozen=True, kw_only=True)
class MarketFacts:
    """The offers of one moment, and the checkpoints that the job can resume from."""

    offers: Sequence[Offer]
    resume_from: tuple[str, ...]
    """Keys of committed manifests, the furthest step first; empty: the job starts at step 0."""
    learned: Corrections
    """Corrections of the estimator from this installation's own runs."""
    plans: PlanSource = plan_for
    quotes: QuoteCache = field(default_factory=QuoteCache)
    """Quotes that this job may share with other jobs of the same round."""


@dataclass(frozen=True, kw_only=True)
class QuotedMarket:
    """The quote of a job and the choice from it."""

    quote: Quote
    shared: SharedQuote
    """The quote that `quote` was derived from, with the record of a purchase."""
    choice: Choice
    room_message: str = ""
    """Names the policy that limits the job's GPUs; empty: no policy does."""


@dataclass(frozen=True, kw_only=True)
class PlacementFacts:
    """All facts on which the placement of one job depends."""

    job: Job
    now: datetime
    """Current time of the database clock."""
    settings: PlacementSettings
    policies: Sequence[Applied] = ()
    """Policies that cover the job, with their spending at `policies_at`."""
    policies_at: datetime
    forbidden: str = ""
    """Reason why the installation does not run this job; empty: it does."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Reason why nothing is bought now, by the key of an offer or an account."""
    troubles: Mapping[str, str] = field(default_factory=dict)
    """Reason why a provider lists no offers, by its name."""
    unreadable: str = ""
    """Error of the blob store; empty: it could be read."""
    market: MarketFacts | None = None
    """None: not gathered yet."""
    quoted: QuotedMarket | None = None
    """Quote that `place` computed before it asked for more facts; None: not computed yet."""
    restored: RestoredDecision | None = None
    """Attempts of the job that a restored backup lacks, by `decide_restored`; None: not gathered yet."""


class MissingFacts(StrEnum):
    """Facts that cost requests to the blob store or to clouds."""

    MARKET = "market"
    RESTORED = "restored"


@dataclass(frozen=True, kw_only=True)
class FactsNeeded:
    """Answer of `place` when the decision depends on facts that were not gathered."""

    missing: MissingFacts
    facts: PlacementFacts
    """The given facts plus the values that `place` has computed from them."""


class PlacementOutcome(StrEnum):
    """Decisions that `place` can take."""

    CANCELLED = "cancelled"
    BACK_OFF_OVER = "back-off over"
    OUT_OF_TIME = "out of time"
    APPROVAL_NEEDED = "approval needed"
    APPROVAL_PENDING = "approval pending"
    APPROVAL_WAIVED = "approval waived"
    WAITING = "waiting"
    CAPPED = "capped"
    NUMBERS_SKIPPED = "numbers skipped"
    """A restored backup lacks attempts of the job; the job continues after their numbers."""
    STOPPED_AFTER_BACKUP = "stopped after backup"
    CAPPED_AFTER_BACKUP = "capped after backup"
    ADMITTED = "admitted"


@dataclass(frozen=True, kw_only=True)
class PlacementDecision:
    """The next state of a job, and the rows that are written with it in one transaction."""

    outcome: PlacementOutcome
    before: Job
    job: Job
    """The job after the decision."""
    message: str = ""
    """Text of the event where it differs from `job.reason`."""
    admit: Attempt | None = None
    """The new attempt; None: no offer is bought."""
    record: bytes | None = None
    """Packed quote of the admitted attempt."""
    ledger: tuple[LedgerEntry, ...] = ()
    event_data: Mapping[str, Any] = field(default_factory=dict)
    due_in_s: float = 0.0
    """Seconds until the job is claimed again; 0: at once."""
