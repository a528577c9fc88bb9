"""Quotes on the wire: the spec to price, and every offer ranked against it."""

from datetime import datetime
from decimal import Decimal
from typing import Any, Literal

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
    """Reason why the offer was kept or dropped."""
    drop: DropReason | None = None
    """Code of the reason; null for a kept line."""
    memory: MemoryView | None = None
    hours_p50: float | None = None
    hours_p90: float | None = None
    usd_p50: Decimal | None = None
    """Expected dollars to finish."""
    usd_p90: Decimal | None = None
    step_s: float | None = None
    evidence: str = ""
    """Basis of the speed."""
    tier: SpeedTier | None = None
    """Code of the basis; null: dropped, or the speed is not known."""
    runs: int = 0
    """Own runs on such a GPU that the speed is based on."""
    nodes: int = 1
    """Number of machines bought together. `hours` and dollars to finish are for all; `offer` is one machine."""
    plan: PlanView | None = None
    """Execution plan; null: dropped, or the workload is not known."""
    hours: HoursView | None = None
    """Parts of `hours_p50`."""
    costs: CostsView | None = None
    """Parts of `usd_p50`."""


class ProspectView(Wire):
    """Expected cost and end of a job that starts now by one policy."""

    action: Literal["buy", "wait"]
    market: Literal["spot", "on-demand"]
    """Market of the offer that is bought, or waited for."""
    offer_id: str
    reason: str
    usd_p10: Decimal
    usd_p50: Decimal
    """Expected dollars to finish."""
    usd_p90: Decimal
    finish_p50: datetime | None
    """Expected end. For a wait: the end if spot does not return before the wait is over; null: it has no limit."""
    finish_p90: datetime | None
    deadline_chance: float | None
    """Least chance of meeting the deadline, 0 to 1; null: no deadline."""


class QuoteView(Wire):
    """All offers for a job; kept ones first, by the job's objective."""

    check: dict[str, Any]
    """Findings about the data set and the model."""
    lines: tuple[LineView, ...]
    """Lines, at most the requested `limit`."""
    kept: int
    """Number of kept offers."""
    drops: dict[DropReason, int]
    """Number of dropped offers, by reason."""
    proposed_cap_usd: Decimal | None
    """P90 of the best line x 1.25; null if no offer is kept."""
    cheapest_usd: Decimal | None
    """Least expected dollars to finish on any offer that fits, even if the cap does not suffice."""
    chosen: ProspectView | None = None
    """The policy that a job submitted now would follow; null: nothing would be bought, or its time is unknown."""
    on_demand: ProspectView | None = None
    """On-demand only, for comparison; null: no such offer is kept, or its time is unknown."""
    latest_on_demand_start: datetime | None = None
    """Latest time at which on-demand still meets the deadline by its P90; null: no deadline, or no such offer."""
    unsold_regions: tuple[str, ...] = ()
    """Requested regions without any offer, each with similar region names."""
    held: HoldView | None = None
    """Effect of policies on the job now, with its cap or the proposed one; null: none."""
    made_at: datetime
    expires_at: datetime
