"""Policies, spending by the quarter-hour, and reported thresholds, in memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal

from broker.domain.job import Attempt, Job
from broker.domain.money import ZERO, LedgerEntry, LedgerKind
from broker.domain.policy import Action, Policy, PolicyVersion, StoredPolicy
from broker.policy.budgets import Applied, BudgetRequest, PolicyUsage, Refusal, judge
from broker.policy.windows import quarter, window_start
from broker.ports.policies import JobOwner

SPENT = frozenset({LedgerKind.CHARGE, LedgerKind.ADJUSTMENT})


@dataclass
class PolicyRow:
    """Versions of one policy, oldest first; the last one decides if the policy is deleted."""

    id: int
    versions: list[PolicyVersion] = field(default_factory=list)

    @property
    def kept(self) -> StoredPolicy | None:
        last = self.versions[-1]
        if last.policy is None:
            return None
        return StoredPolicy(
            id=self.id, version=last.version, policy=last.policy, changed_at=last.at, changed_by=last.actor
        )


class PolicyTables:
    def __init__(self) -> None:
        self.rows: dict[tuple[str | None, str], PolicyRow] = {}
        self.usage: dict[tuple[str, str, datetime], Decimal] = {}
        self.booked: list[tuple[datetime, LedgerEntry]] = []
        """The ledger of all jobs with the times of its entries."""
        self.told: dict[tuple[int, str, Decimal, Action], datetime] = {}

    def book(self, entry: LedgerEntry, job: Job, now: datetime) -> None:
        self.booked.append((now, entry))
        if entry.kind in SPENT:
            key = job.team, job.owner, quarter(now)
            self.usage[key] = self.usage.get(key, ZERO) + entry.usd

    def live(self) -> Iterable[tuple[int, Policy]]:
        """Return policies that hold, in the order of their ids."""
        kept = (row.kept for row in self.rows.values())
        return sorted(((one.id, one.policy) for one in kept if one), key=lambda one: one[0])

    def applied(
        self, policies: Iterable[tuple[int, Policy]], running: Sequence[tuple[Job, Attempt]], now: datetime
    ) -> list[Applied]:
        """Return the policies with their usage; `running`: live attempts of all teams."""
        return [Applied(id=key, policy=policy, usage=self._usage(policy, running, now)) for key, policy in policies]

    def _usage(self, policy: Policy, running: Sequence[tuple[Job, Attempt]], now: datetime) -> PolicyUsage:
        mine = [attempt for job, attempt in running if policy.covers(job.team, job.owner)]
        starts = [window_start(budget, policy.zone, now) for budget in policy.budgets]
        spent = [(bucket, usd) for (team, owner, bucket), usd in self.usage.items() if policy.covers(team, owner)]
        return PolicyUsage(
            charged=tuple(sum((usd for bucket, usd in spent if bucket >= start), ZERO) for start in starts),
            outstanding_usd=sum((max(ZERO, one.reserved_usd - one.charged_usd) for one in mine), ZERO),
            gpus=sum(one.line.offer.gpus * one.line.nodes for one in mine),
            jobs=len(mine),
        )

    def refusal(
        self, ask: BudgetRequest, whose: JobOwner, running: Sequence[tuple[Job, Attempt]], now: datetime
    ) -> Refusal | None:
        covering = [(key, policy) for key, policy in self.live() if policy.covers(*whose)]
        return judge(ask, self.applied(covering, running, now), now) if covering else None
