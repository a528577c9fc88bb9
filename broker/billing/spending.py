"""Groups what was paid, and sets it against what the same work would have cost elsewhere.

Lost work is counted as cost.
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
NOBODY = "-"
"""Key of what has no cloud or GPU: storage."""


def billed_hours(attempt: Attempt) -> Decimal:
    """Hours of one of its machines that were charged, in exact time, without the quantum's rounding."""
    runs = attempt.running_at if attempt.line.offer.billed_from == "running" else None
    start, end = runs or attempt.create_sent_at, attempt.absent_at or attempt.charged_to
    return max(ZERO, _seconds(start, end) / HOUR)


def lost_share(attempt: Attempt) -> Decimal:
    """Share of an attempt's cost that bought no progress, 0..1.

    All of it where it never trained. Else the share of its life that went into steps after its last checkpoint, the
    time of training being spread evenly over its steps. What still runs has lost nothing yet.
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
    """(first, last, last saved) step of an attempt, as its beats and its last word tell them."""
    told = [document for document in (attempt.beat, attempt.final) if document is not None]
    begun = max((one.resumed_from or 0 for one in told), default=0)
    reached = max((one.step for one in told), default=0)
    saved = max((one.checkpoint.step for one in told if one.checkpoint), default=0)
    return begun, reached, min(saved, reached)


def _seconds(start: datetime | None, end: datetime | None) -> Decimal:
    return ZERO if start is None or end is None else Decimal(repr((end - start).total_seconds()))


@dataclass(frozen=True, kw_only=True)
class _AttemptTotals:
    """An attempt's whole life, to be shared out over its slices by dollars."""

    machine_hours: Decimal
    gpu_hours: Decimal
    lost: Decimal
    on_demand_usd: Decimal | None
    dearest_ratio: Decimal | None


def _measure(paid: PaidAttempt) -> _AttemptTotals:
    attempt = paid.attempt
    offer, lost = attempt.line.offer, lost_share(attempt)
    hours = billed_hours(attempt) * attempt.line.nodes
    on_demand = offer.on_demand_usd_per_hour if offer.spot else offer.usd_per_hour
    expected = attempt.line.usd_p50
    dearer = paid.dearest_usd is not None and expected is not None and expected > 0
    return _AttemptTotals(
        machine_hours=hours,
        gpu_hours=hours * offer.gpus,
        lost=lost,
        on_demand_usd=None if on_demand is None else on_demand * hours * (1 - lost),
        dearest_ratio=paid.dearest_usd / expected * (1 - lost) if dearer and paid.dearest_usd and expected else None,
    )


@dataclass
class _Group:
    """Sums of one row; rounded once, when the row is made."""

    by_category: dict[LedgerCategory, Decimal] = field(default_factory=lambda: defaultdict(Decimal))
    sums: dict[str, Decimal] = field(default_factory=lambda: defaultdict(Decimal))
    jobs: set[JobId] = field(default_factory=set)
    attempts: set[AttemptId] = field(default_factory=set)

    def add(self, piece: Slice, share: Decimal, measure: _AttemptTotals | None) -> None:
        """`share`: of the attempt's whole compute that this slice is."""
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
    """Every slice in exactly one row, and all of them in the total."""
    measures = {attempt_id: _measure(one) for attempt_id, one in paid.attempts.items()}
    groups: dict[str, _Group] = defaultdict(_Group)
    total = _Group()
    key_of = _KEYS[by]
    for piece in paid.slices:
        one = paid.attempts.get(piece.attempt_id) if piece.attempt_id is not None else None
        measure = measures[piece.attempt_id] if one is not None and piece.attempt_id is not None else None
        share = piece.usd / one.compute_usd if one is not None and one.compute_usd > 0 else ZERO
        for group in (groups[key_of(paid, piece, one)], total):
            group.add(piece, share, measure)
    rows = [group.row(key) for key, group in groups.items()]
    rows.sort(key=(lambda row: row.key) if by in ("day", "month") else (lambda row: (-row.usd, row.key)))
    return SpendReport(by=by, rows=tuple(rows), total=total.row("total"))


_KEYS: dict[SpendBy, Callable[[Paid, Slice, PaidAttempt | None], str]] = {
    "job": lambda paid, piece, one: piece.job_id,
    "user": lambda paid, piece, one: f"{paid.jobs[piece.job_id].team}/{paid.jobs[piece.job_id].owner}",
    "team": lambda paid, piece, one: paid.jobs[piece.job_id].team,
    "cloud": lambda paid, piece, one: one.attempt.line.offer.cloud if one else NOBODY,
    "gpu": lambda paid, piece, one: one.attempt.line.offer.accelerator if one else NOBODY,
    "day": lambda paid, piece, one: piece.day.isoformat(),
    "month": lambda paid, piece, one: f"{piece.day:%Y-%m}",
}
