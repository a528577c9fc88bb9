"""Simulates the effect that a policy would have had on the attempts in the ledger.

Each attempt is replayed by the rules that hold launches today. A held attempt starts when the policy allows it, with
the same charges at the same pace. Later attempts of its job are delayed as well. A drained attempt resumes in the same
way. Approval is assumed to be immediate. Effects that other policies had in the past are not undone.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import count

from broker.domain.ids import JobId
from broker.domain.money import ZERO
from broker.domain.policy import Action, Policy
from broker.policy.budgets import Applied, BudgetRequest, Hold, PolicyUsage, drains, judge, reached
from broker.policy.windows import QUARTER, quarter, window_start


@dataclass(frozen=True, kw_only=True)
class LedgerAttempt:
    """One attempt in the ledger. `charges` are (quarter-hour, dollars), oldest first."""

    job_id: JobId
    number: int
    team: str
    owner: str
    gpus: int
    cap_usd: Decimal
    reserved_usd: Decimal
    at: datetime
    ended_at: datetime | None
    charges: tuple[tuple[datetime, Decimal], ...] = ()


@dataclass(frozen=True, kw_only=True)
class StorageSpending:
    """Dollars charged in a quarter-hour to no attempt: storage."""

    team: str
    owner: str
    at: datetime
    usd: Decimal


@dataclass(frozen=True, kw_only=True)
class History:
    """Contents of the ledger up to `now`."""

    now: datetime
    attempts: Sequence[LedgerAttempt] = ()
    others: Sequence[StorageSpending] = ()


@dataclass(frozen=True, kw_only=True)
class Held:
    """A launch that would have waited from `at` to `until`; None: until the end of the replay."""

    job_id: JobId
    attempt: int
    at: datetime
    until: datetime | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class DrainedAttempt:
    job_id: JobId
    attempt: int
    at: datetime


@dataclass(frozen=True, kw_only=True)
class ApprovalRequest:
    """A job for which approval would have been requested."""

    job_id: JobId
    at: datetime
    reason: str


@dataclass(frozen=True, kw_only=True)
class CrossedThreshold:
    """A threshold that users would have been notified about."""

    budget: str
    share: Decimal
    action: Action
    at: datetime


@dataclass(frozen=True, kw_only=True)
class DryRun:
    since: datetime
    until: datetime
    launches: int
    held: tuple[Held, ...]
    drained: tuple[DrainedAttempt, ...]
    asked: tuple[ApprovalRequest, ...]
    crossed: tuple[CrossedThreshold, ...]
    usd_spent: Decimal
    """Dollars charged in that time to the jobs that the policy covers."""
    usd_not_spent: Decimal
    """The part of `usd_spent` that the policy would have prevented by the end."""


def dry_run(policy: Policy, since: datetime, history: History) -> DryRun:
    """Replay the past from `since` under `policy`.

    `history` reaches further back by the longest window, so that the spending of every budget is known at `since`.
    """
    return _Replay(policy=policy, since=since, history=history).run()


@dataclass(kw_only=True, eq=False)
class _Live:
    """An attempt in the replay. `left`: charges not yet made, at the times of the replay."""

    past: LedgerAttempt
    left: list[tuple[datetime, Decimal]]
    ends_at: datetime | None
    reserved: Decimal
    gap: timedelta
    """Time since the end of the job's previous attempt."""
    charged: Decimal = ZERO
    held_since: datetime | None = None
    reason: str = ""

    def shift(self, by: timedelta) -> None:
        """Delay everything that is still to come."""
        self.left = [(at + by, usd) for at, usd in self.left]
        self.ends_at = self.ends_at and self.ends_at + by


@dataclass(kw_only=True)
class _Replay:
    policy: Policy
    since: datetime
    history: History
    total: Decimal = ZERO
    """Dollars charged in the replay so far."""
    before: dict[datetime, Decimal] = field(default_factory=dict)
    """`total` at the start of a quarter-hour."""
    running: list[_Live] = field(default_factory=list)
    waiting: list[_Live] = field(default_factory=list)
    later: dict[JobId, list[_Live]] = field(default_factory=dict)
    """Later attempts of each job, in their order."""
    agenda: list[tuple[datetime, int, bool, _Live]] = field(default_factory=list)
    """Starts (True) and ends of running attempts, in the order of time."""
    ticket: "count[int]" = field(default_factory=count)
    launches: int = 0
    held: list[Held] = field(default_factory=list)
    drained: list[DrainedAttempt] = field(default_factory=list)
    asked: dict[JobId, ApprovalRequest] = field(default_factory=dict)
    crossed: dict[tuple[str, Decimal, Action], list[CrossedThreshold]] = field(default_factory=dict)

    def run(self) -> DryRun:
        history = self.history
        attempts = [attempt for attempt in history.attempts if self.policy.covers(attempt.team, attempt.owner)]
        others = [other for other in history.others if self.policy.covers(other.team, other.owner)]
        self._enter(attempts)
        paid = [(at, usd) for attempt in attempts for at, usd in attempt.charges]
        paid += [(other.at, other.usd) for other in others]
        began = [*(attempt.at for attempt in attempts), *(other.at for other in others)]
        at = quarter(min(began, default=self.since))
        stored = sorted(others, key=lambda other: other.at)
        while at < history.now:
            self.before[at] = self.total
            while stored and stored[0].at < at + QUARTER:
                self.total += stored.pop(0).usd
            self._step(at, min(at + QUARTER, history.now))
            at += QUARTER
        spent = sum((usd for when, usd in paid if when >= quarter(self.since)), ZERO)
        still_held = (self._as_held(live, None) for live in self.waiting)
        crossed = (crossing for crossings in self.crossed.values() for crossing in crossings)
        return DryRun(
            since=self.since,
            until=history.now,
            launches=self.launches,
            held=(*self.held, *still_held),
            drained=tuple(self.drained),
            asked=tuple(self.asked.values()),
            crossed=tuple(sorted(crossed, key=lambda crossing: crossing.at)),
            usd_spent=spent,
            usd_not_spent=max(ZERO, sum((usd for _, usd in paid), ZERO) - self.total),
        )

    def _enter(self, attempts: Sequence[LedgerAttempt]) -> None:
        """Schedule the launch of every job's first attempt. `_end_run` schedules the job's next attempt."""
        for past in sorted(attempts, key=lambda attempt: (attempt.job_id, attempt.number)):
            before = self.later.setdefault(past.job_id, [])
            ended = before[-1].past.ended_at if before else None
            live = _Live(
                past=past,
                left=list(past.charges),
                ends_at=past.ended_at,
                reserved=past.reserved_usd,
                gap=max(timedelta(0), past.at - ended) if ended else timedelta(0),
            )
            before.append(live)
        for following in self.later.values():
            self._note(following[0].past.at, following.pop(0), starts=True)

    def _note(self, at: datetime, live: _Live, *, starts: bool) -> None:
        heapq.heappush(self.agenda, (at, next(self.ticket), starts, live))

    def _step(self, at: datetime, until: datetime) -> None:
        """Replay a quarter-hour: charges and thresholds, then ends and starts in the order of time."""
        self._charge(until)
        self._record_thresholds(at)
        self._retry(at)
        while self.agenda and self.agenda[0][0] < until:
            when, _, starts, live = heapq.heappop(self.agenda)
            if starts:
                live.shift(when - live.past.at)
                self._launch(live, when)
            elif live in self.running and live.ends_at == when:  # a drained attempt ends later
                self._end_run(live, when)
        self._charge(until)

    def _charge(self, until: datetime) -> None:
        for live in self.running:
            while live.left and live.left[0][0] < until:
                usd = live.left.pop(0)[1]
                live.charged += usd
                self.total += usd

    def _retry(self, at: datetime) -> None:
        waiting, self.waiting = self.waiting, []
        for live in waiting:
            self._launch(live, at)

    def _end_run(self, live: _Live, ended: datetime) -> None:
        self.running.remove(live)
        self.total += sum((usd for _, usd in live.left), ZERO)
        following = self.later[live.past.job_id]
        if following:
            self._note(ended + following[0].gap, following.pop(0), starts=True)
        self._retry(ended)

    def _usage(self, at: datetime) -> PolicyUsage:
        starts = [window_start(budget, self.policy.zone, at) for budget in self.policy.budgets]
        return PolicyUsage(
            charged=tuple(self.total - self.before.get(start, ZERO) for start in starts),
            outstanding_usd=sum((max(ZERO, live.reserved - live.charged) for live in self.running), ZERO),
            gpus=sum(live.past.gpus for live in self.running),
            jobs=len(self.running),
        )

    def _record_thresholds(self, at: datetime) -> None:
        """Record each threshold once a period, and drain while the share of a drain threshold is spent."""
        if at < self.since:
            return
        usage = self._usage(at)
        for reached_threshold in reached(self.policy, usage):
            budget, threshold = reached_threshold.budget, reached_threshold.threshold
            crossings = self.crossed.setdefault((budget.key, threshold.at, threshold.action), [])
            if not crossings or crossings[-1].at < window_start(budget, self.policy.zone, at):
                name = f"{budget.per}/{budget.window}"
                crossings.append(CrossedThreshold(budget=name, share=threshold.at, action=threshold.action, at=at))
        if drains(self.policy, usage) is None:
            return
        for live in self.running:
            self.drained.append(DrainedAttempt(job_id=live.past.job_id, attempt=live.past.number, at=at))
            live.reserved, live.charged = max(ZERO, live.reserved - live.charged), ZERO
            live.held_since, live.reason = at, "drained"
        self.waiting += self.running
        self.running = []

    def _launch(self, live: _Live, at: datetime) -> None:
        """Start an attempt, or let it wait. Launches before `since` are not held."""
        refusal = None
        if at >= self.since:
            self.launches += live.held_since is None
            refusal = self._refusal(live, at)
        if refusal is not None:
            live.held_since, live.reason = live.held_since or at, live.reason or refusal
            self.waiting.append(live)
            return
        if live.held_since is not None:
            if at > live.held_since:
                self.held.append(self._as_held(live, at))
            live.shift(at - live.held_since)
            live.held_since, live.reason = None, ""
        self.running.append(live)
        if live.ends_at is not None:
            self._note(live.ends_at, live, starts=False)

    def _refusal(self, live: _Live, at: datetime) -> str | None:
        past = live.past
        ask = BudgetRequest(reserve_usd=live.reserved, cap_usd=past.cap_usd, gpus=past.gpus, jobs=1)
        applied = (Applied(id=0, policy=self.policy, usage=self._usage(at)),)
        refusal = judge(ask, applied, at)
        if refusal is not None and refusal.hold is Hold.APPROVAL:
            self.asked.setdefault(past.job_id, ApprovalRequest(job_id=past.job_id, at=at, reason=refusal.reason))
        if past.job_id in self.asked:
            refusal = judge(replace(ask, approved_usd=past.cap_usd), applied, at)
        return refusal.reason if refusal else None

    def _as_held(self, live: _Live, until: datetime | None) -> Held:
        at = live.held_since or self.since
        return Held(job_id=live.past.job_id, attempt=live.past.number, at=at, until=until, reason=live.reason)
