"""Quotes on the wire: the spec to price, and every offer ranked against it."""

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import Field

from broker.api.schemas.base import Wire
from broker.api.schemas.offers import OfferView
from broker.api.schemas.plans import CostsView, HoursView, MemoryView, PlanView
from broker.api.schemas.policies import HoldView
from broker.domain.formatting import duration
from broker.domain.money import format_usd
from broker.domain.offer import DropReason, OfferVerdict
from broker.domain.spec import JobSpec, Usd
from broker.domain.workload import SpeedTier
from broker.reporting.notebook_html import table_html, text_html
from trainer.contract.base import Config

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
    """Minimum chance of meeting the deadline, 0 to 1; null: no deadline."""


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
    """Minimum expected dollars to finish on any offer that fits, even if the cap does not suffice."""
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

    def _repr_html_(self) -> str:
        """Return the dollars to finish and the best offers, for notebooks."""
        dropped = ", ".join(f"{count} {reason.value}" for reason, count in self.drops.items())
        counts = f"{self.kept} offers fit; dropped: {dropped or 'none'}."
        best = [line for line in self.lines if line.drop is None][:NOTEBOOK_LINES]
        if not best:
            return f"<p>{text_html(f'No offer fits. {counts}')}</p>"
        head = f"About {_usd(best[0].usd_p50)} to finish, with 90 % chance at most {_usd(best[0].usd_p90)}. {counts}"
        names = ("GPU", "Cloud", "$ per hour", "$ to finish, P50 – P90", "Time, P50")
        return f"<p>{text_html(head)}</p>" + table_html(names, [_cells(line) for line in best])


NOTEBOOK_LINES = 5
"""Number of offers that a notebook shows."""


def _cells(line: LineView) -> tuple[str, ...]:
    offer, count = line.offer, line.nodes * line.offer.gpus
    market = "spot" if offer.spot else "on demand"
    return (
        f"{count} × {offer.accelerator}" if count > 1 else offer.accelerator,
        f"{offer.cloud}{' (simulated)' if offer.simulated else ''} {offer.region} {market}",
        format_usd(offer.usd_per_hour * line.nodes),
        f"{_usd(line.usd_p50)} – {_usd(line.usd_p90)}",
        duration(None if line.hours_p50 is None else line.hours_p50 * 3600),
    )


def _usd(amount: Decimal | None) -> str:
    return "–" if amount is None else format_usd(amount)


GpuCount = Annotated[int, Field(ge=1, le=512)]
WhatIfMethod = Literal["full", "lora", "qlora", "lora8"]


class WhatIfRequest(Config):
    """A fine-tune without a data set, whose memory and scaling are estimated."""

    model: Annotated[str, Field(min_length=1, max_length=200)]
    """Hub id of a model of the bundled catalogue."""
    gpu: Annotated[str, Field(min_length=1, max_length=100)] = "h100-sxm"
    """Kind of GPU: `l40s`, or the name in nvidia-smi."""
    method: WhatIfMethod = "lora"
    gpus: Annotated[tuple[GpuCount, ...], Field(min_length=1, max_length=16)] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    """Numbers of GPUs to compare, ascending."""
    max_length: Annotated[int, Field(ge=1, le=1_000_000)] = 2048
    """Tokens of a row."""
    global_batch: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Rows of a step; null: as many as the largest number of GPUs."""
    lora_r: Annotated[int, Field(ge=1, le=4096)] = 16
    """Rank of the adapter."""
    rows: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Rows of the data set, for the hours and dollars of one epoch; null: neither is estimated."""
    usd_per_gpu_hour: Annotated[Decimal, Field(ge=0, le=1_000_000)] | None = None
    """Price of one GPU in dollars an hour; null: no dollars are estimated."""


class WhatIfPoint(Wire):
    """Best plan for one number of GPUs. Without a plan that fits, `plan` and the figures of speed are null."""

    gpus: int
    nodes: int
    """Machines, of eight GPUs each."""
    need_bytes: int
    """Bytes that one GPU needs, with margin."""
    memory_bytes: dict[str, int]
    """Parts of `need_bytes`: weights, gradients, optimizer, activations, logits, temporary, communication, context,
    and the margin of the estimate.
    """
    plan: PlanView | None
    step_s: float | None
    tokens_per_s: float | None
    """Tokens a second of all GPUs."""
    tokens_per_s_interval: tuple[float, float] | None
    tokens_per_s_evidence: str | None
    tokens_per_s_basis: str
    mfu: float | None
    """Model FLOP utilisation, 0 to 1."""
    hours: float | None
    usd: Decimal | None


class WhatIfView(Wire):
    """Memory and scaling of a fine-tune over numbers of GPUs."""

    model: str
    gpu: str
    gpu_memory_bytes: int
    method: str
    global_batch: int
    tokens_per_row: float
    steps: int
    """Optimizer steps of one epoch; 0: `rows` was not given."""
    usd_per_gpu_hour: Decimal | None
    points: tuple[WhatIfPoint, ...]
    assumptions: tuple[str, ...]
