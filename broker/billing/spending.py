"""Groups payments, and compares them with the cost of the same work elsewhere.

"On demand" has one meaning everywhere: the useful hours of an attempt at the same cloud's on-demand price. Lost work is
part of the payments only, because an on-demand machine loses no work.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal

from broker.domain.ids import AttemptId, JobId
from broker.domain.job import Attempt, Reason
from broker.domain.money import ZERO, LedgerCategory, usd
from broker.domain.spending import Paid, PaidAttempt, Slice, SpendBy, SpendReport, SpendRow

HOUR = Decimal(3600)
NO_KEY = "-"
"""Key of a group without cloud or GPU: storage."""


def billed_hours(attempt: Attempt) -> Decimal:
    """Return the charged hours of one machine of an attempt, exact and without rounding to the quantum."""
    runs = attempt.running_at if attempt.line.offer.billed_from == "running" else None
    start, end = runs or attempt.create_sent_at, attempt.absent_at or attempt.charged_to
    return max(ZERO, _seconds(start, end) / HOUR)


def lost_share(attempt: Attempt) -> Decimal:
    """Return the share of an attempt's cost without progress, 0..1.

    The share is 1 if the attempt completed no step. Otherwise it is the part of the attempt's life spent on steps after
    the last checkpoint, with training time spread evenly over the steps. A running or completed attempt has lost
    nothing.
    """
    if attempt.live or attempt.reason is Reason.COMPLETED:
        return ZERO
    if attempt.first_beat_at is None:
        return Decimal(1)
    begun, reached, saved = _steps(attempt)
    if reached <= begun:
        return Decimal(1)
    since = attempt.running_at or attempt.create_sent_at or attempt.created_at
    ended = attempt.terminating_since or attempt.ended_at
    life, trained = _seconds(since, attempt.absent_at or attempt.ended_at), _seconds(attempt.first_beat_at, ended)
    if life <= 0:
        return ZERO
    return min(Decimal(1), trained / life) * Decimal(reached - max(begun, saved)) / Decimal(reached - begun)


def _steps(attempt: Attempt) -> tuple[int, int, int]:
    """Return the first, last and last saved step of an attempt, from its heartbeats and final report."""
    documents = [document for document in (attempt.beat, attempt.final) if document is not None]
    begun = max((document.resumed_from or 0 for document in documents), default=0)
    reached = max((document.step for document in documents), default=0)
    saved = max((document.checkpoint.step for document in documents if document.checkpoint), default=0)
    return begun, reached, min(saved, reached)


def _seconds(start: datetime | None, end: datetime | None) -> Decimal:
    return ZERO if start is None or end is None else Decimal(repr((end - start).total_seconds()))


def on_demand_usd(attempt: Attempt) -> Decimal | None:
    """Return the exact cost of the attempt's useful hours on demand; None: the on-demand price is unknown."""
    offer = attempt.line.offer
    price = offer.on_demand_usd_per_hour if offer.spot else offer.usd_per_hour
    return None if price is None else price * billed_hours(attempt) * attempt.line.nodes * (1 - lost_share(attempt))


@dataclass(frozen=True, kw_only=True)
class _AttemptTotals:
    """Measurements of an attempt's whole life, divided among its slices by dollars."""

    machine_hours: Decimal
    gpu_hours: Decimal
    lost: Decimal
    on_demand_usd: Decimal | None
    dearest_ratio: Decimal | None


def _measure(paid: PaidAttempt) -> _AttemptTotals:
    attempt = paid.attempt
    offer, lost = attempt.line.offer, lost_share(attempt)
    hours = billed_hours(attempt) * attempt.line.nodes
    expected = attempt.line.usd_p50
    dearer = paid.dearest_usd is not None and expected is not None and expected > 0
    return _AttemptTotals(
        machine_hours=hours,
        gpu_hours=hours * offer.gpus,
        lost=lost,
        on_demand_usd=on_demand_usd(attempt),
        dearest_ratio=paid.dearest_usd / expected * (1 - lost) if dearer and paid.dearest_usd and expected else None,
    )


@dataclass
class _Group:
    """Sums of one row, which are rounded once, in `row`."""

    by_category: dict[LedgerCategory, Decimal] = field(default_factory=lambda: defaultdict(Decimal))
    sums: dict[str, Decimal] = field(default_factory=lambda: defaultdict(Decimal))
    jobs: set[JobId] = field(default_factory=set)
    attempts: set[AttemptId] = field(default_factory=set)

    def add(self, piece: Slice, share: Decimal, measure: _AttemptTotals | None) -> None:
        """Add a slice.

        `share`: the slice's share of the attempt's whole compute cost.
        """
        self.by_category[piece.category] += piece.usd
        self.jobs.add(piece.job_id)
        if piece.attempt_id is not None:
            self.attempts.add(piece.attempt_id)
        if measure is None or piece.category is not LedgerCategory.COMPUTE:
            return
        self.sums["machine_hours"] += measure.machine_hours * share
        self.sums["gpu_hours"] += measure.gpu_hours * share
        self.sums["lost_usd"] += piece.usd * measure.lost
        if measure.on_demand_usd is not None:
            self.sums["on_demand_usd"] += measure.on_demand_usd * share
            self.sums["on_demand_of_usd"] += piece.usd
        if measure.dearest_ratio is not None:
            self.sums["dearest_usd"] += piece.usd * measure.dearest_ratio
            self.sums["dearest_of_usd"] += piece.usd

    def row(self, key: str) -> SpendRow:
        money = {name: usd(self.sums[name]) for name in _MONEY}
        return SpendRow(
            key=key,
            usd=sum(self.by_category.values(), ZERO),
            compute_usd=self.by_category[LedgerCategory.COMPUTE],
            egress_usd=self.by_category[LedgerCategory.EGRESS],
            storage_usd=self.by_category[LedgerCategory.STORAGE],
            machine_hours=float(self.sums["machine_hours"]),
            gpu_hours=float(self.sums["gpu_hours"]),
            jobs=len(self.jobs),
            attempts=len(self.attempts),
            **money,
        )


_MONEY = ("lost_usd", "on_demand_usd", "on_demand_of_usd", "dearest_usd", "dearest_of_usd")


def report(paid: Paid, by: SpendBy) -> SpendReport:
    """Return a report with every slice in exactly one row, and all slices in the total."""
    measures = {attempt_id: _measure(paid_attempt) for attempt_id, paid_attempt in paid.attempts.items()}
    groups: dict[str, _Group] = defaultdict(_Group)
    total = _Group()
    key_of = _KEYS[by]
    for piece in paid.slices:
        attempt = paid.attempts.get(piece.attempt_id) if piece.attempt_id is not None else None
        measure = measures[piece.attempt_id] if attempt is not None and piece.attempt_id is not None else None
        share = piece.usd / attempt.compute_usd if attempt is not None and attempt.compute_usd > 0 else ZERO
        for group in (groups[key_of(paid, piece, attempt)], total):
            group.add(piece, share, measure)
    rows = [group.row(key) for key, group in groups.items()]
    rows.sort(key=(lambda row: row.key) if by in ("day", "month") else (lambda row: (-row.usd, row.key)))
    return SpendReport(by=by, rows=tuple(rows), total=total.row("total"))


_KEYS: dict[SpendBy, Callable[[Paid, Slice, PaidAttempt | None], str]] = {
    "job": lambda paid, piece, attempt: piece.job_id,
    "user": lambda paid, piece, attempt: f"{paid.jobs[piece.job_id].team}/{paid.jobs[piece.job_id].owner}",
    "team": lambda paid, piece, attempt: paid.jobs[piece.job_id].team,
    "cloud": lambda paid, piece, attempt: attempt.attempt.line.offer.cloud if attempt else NO_KEY,
    "gpu": lambda paid, piece, attempt: attempt.attempt.line.offer.accelerator if attempt else NO_KEY,
    "day": lambda paid, piece, attempt: piece.day.isoformat(),
    "month": lambda paid, piece, attempt: f"{piece.day:%Y-%m}",
}
