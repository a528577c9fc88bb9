"""Decides what becomes of an orphan: wait, report, or destroy; and what a machine of an ended attempt costs.

`broker.controllers.termination.orphan_sweep` gathers the facts, and records in `OrphanWatch` what each listing shows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum

from broker.billing.accrual import traffic_owed, uncharged_after_end_usd
from broker.domain.job import Attempt
from broker.lifecycle.orphans import Orphan, spared_message


@dataclass(frozen=True, kw_only=True)
class OrphanFacts:
    """All facts on which the decision about one orphan depends."""

    orphan: Orphan
    listed_s: float
    """Seconds since this process first listed the orphan."""
    lag_s: float
    """Seconds by which a listing may lag behind the cloud."""
    report_only: bool = False
    """True if the database is new, and may lack the attempts of the machines."""
    is_bought: bool | None = None
    """True if the spec of an orphan without an attempt is in the blob store; None: not read, or unreadable.

    A backup that was restored lacks the attempt of such a machine.
    """


class OrphanStep(StrEnum):
    """Decisions about an orphan."""

    WAIT = "wait"
    """The attempt may be younger than the listing, or the listing may not show the machine's end yet."""
    SPARE = "spare"
    """Report it, and destroy nothing."""
    DESTROY = "destroy"


@dataclass(frozen=True, kw_only=True)
class OrphanDecision:
    """Decision about one orphan."""

    step: OrphanStep
    wait_s: float = 0.0
    """Seconds until the decision WAIT is taken again."""
    message: str = ""
    """Why the orphan is spared."""


def decide_orphan(facts: OrphanFacts) -> OrphanDecision:
    """Return the decision about an orphan, which is destroyed once it is older than the list lag."""
    wait_s = facts.lag_s - facts.listed_s
    if wait_s > 0:
        return OrphanDecision(step=OrphanStep.WAIT, wait_s=wait_s)
    message = spared_message(facts.orphan, report_only=facts.report_only, was_bought=facts.is_bought)
    if message is not None:
        return OrphanDecision(step=OrphanStep.SPARE, message=message)
    return OrphanDecision(step=OrphanStep.DESTROY)


@dataclass(kw_only=True)
class OrphanWatch:
    """Orphans of one cloud over its listings, by machine id. Times are monotonic."""

    first_listed: dict[str, float] = field(default_factory=dict)
    """Time at which an orphan was first decided on."""
    missing_once: set[str] = field(default_factory=set)
    """Orphans of `first_listed` that the latest listing omits."""
    asked: dict[str, Orphan] = field(default_factory=dict)
    """Orphans whose destroy was sent and is not answered yet."""
    charged: set[str] = field(default_factory=set)
    """Orphans of `asked` that were charged after they were last listed."""

    def observe(self, listed: Mapping[str, Orphan], *, is_new: bool) -> Mapping[str, Orphan]:
        """Record the orphans of a listing, and return those to decide on.

        `is_new`: False for an old listing. Its machines may have been destroyed since, so only the orphans of
        `first_listed` count, and none counts as missing. An orphan is forgotten when two consecutive new listings omit
        it.
        """
        if not is_new:
            listed = {machine: orphan for machine, orphan in listed.items() if machine in self.first_listed}
        self.charged = (self.charged & self.asked.keys()) - listed.keys()
        orphans = {**listed, **self.asked}
        if is_new:
            missing = self.first_listed.keys() - orphans.keys()
            for machine in missing & self.missing_once:
                del self.first_listed[machine]
            self.missing_once = missing & self.first_listed.keys()
        return orphans


@dataclass(frozen=True, kw_only=True)
class LateMachineFacts:
    """All facts on which the charge of a machine after the end of its attempt depends."""

    orphan: Orphan
    attempt: Attempt
    """The ended attempt as read just now."""
    now: datetime
    first_listed_at: datetime
    """Database time at which this process first listed the orphan."""
    existing: int
    """Number of machines of the attempt that the latest listing shows."""


def late_amounts(facts: LateMachineFacts) -> tuple[Decimal, Decimal] | None:
    """Return dollars owed after the attempt's end for machines and for traffic; None: nothing is owed.

    None instead of zeros avoids a charge that only moves `charged_to`. The creation time is limited to the first
    listing, because the cloud's clock may be ahead.
    """
    orphan, attempt, now = facts.orphan, facts.attempt, facts.now
    born_at = None if orphan.born is None else min(orphan.born, facts.first_listed_at)
    usd = uncharged_after_end_usd(attempt, orphan.observed.handle, born_at, now, standing=facts.existing)
    traffic_usd = traffic_owed(attempt, now)
    return (usd, traffic_usd) if usd or traffic_usd else None
