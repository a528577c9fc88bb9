"""Quotes on the wire: the spec to price, and every offer ranked against it."""

from datetime import datetime
from decimal import Decimal
from typing import Any

from broker.api.schemas.base import Wire
from broker.api.schemas.offers import OfferView
from broker.api.schemas.plans import CostsView, HoursView, MemoryView, PlanView
from broker.api.schemas.policies import HoldView
from broker.domain.offer import DropReason, OfferVerdict
from broker.domain.spec import JobSpec, Usd
from broker.domain.workload import SpeedTier

NO_CAP = Decimal(1_000_000)
"""Cap of a quoted spec that names none, in dollars: the highest that a spec allows."""


class QuoteSpec(JobSpec):
    """A job's spec; the cap may be left out, and the quote proposes one."""

    cap_usd: Usd = NO_CAP


class LineView(Wire):
    """One offer against the job."""

    offer: OfferView
    verdict: OfferVerdict
    reason: str
    """Why it was kept or dropped."""
    drop: DropReason | None = None
    """The same for programs; null for a kept line."""
    memory: MemoryView | None = None
    hours_p50: float | None = None
    hours_p90: float | None = None
    usd_p50: Decimal | None = None
    """Expected dollars to finish."""
    usd_p90: Decimal | None = None
    step_s: float | None = None
    evidence: str = ""
    """What the speed rests on."""
    tier: SpeedTier | None = None
    """The same for programs; null: dropped, or nothing is known of the speed."""
    runs: int = 0
    """Own runs on such a GPU that it rests on."""
    nodes: int = 1
    """Machines of this kind that are bought together; `hours` and dollars to finish are of all, `offer` is of one."""
    plan: PlanView | None = None
    """null: dropped, or nothing is known of what is to run."""
    hours: HoursView | None = None
    """What `hours_p50` consists of."""
    costs: CostsView | None = None
    """What `usd_p50` consists of."""


class QuoteView(Wire):
    """All offers against the job, kept ones first by its objective."""

    check: dict[str, Any]
    """What was found out about the data set and the model."""
    lines: tuple[LineView, ...]
    """At most the `limit` that was asked for."""
    kept: int
    """Offers kept in all."""
    drops: dict[DropReason, int]
    """Offers dropped in all, by reason."""
    proposed_cap_usd: Decimal | None
    """P90 of the best line x 1.25; null when nothing is kept."""
    cheapest_usd: Decimal | None
    """Least expected dollars to finish on any offer that fits, also where the cap does not suffice."""
    unsold_regions: tuple[str, ...] = ()
    """Regions that were asked for and no offer is in, each with those that it may mean."""
    held: HoldView | None = None
    """What a policy would do to the job now, with its cap or else the proposed one; null: none would hold it."""
    made_at: datetime
    expires_at: datetime
