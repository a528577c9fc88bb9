"""Jobs, attempts, events and ledger lines on the wire. Times are ISO 8601 in UTC, sizes are bytes."""

from datetime import datetime
from decimal import Decimal
from typing import Any

from broker.api.schemas.base import Wire
from broker.api.schemas.job_data import StorageView
from broker.api.schemas.job_list import JobPage as JobPage
from broker.api.schemas.job_list import JobView as JobView
from broker.api.schemas.offers import OfferView
from broker.domain.ids import AttemptId, InstanceName
from broker.domain.job import RESTING_JOB_STATES, AttemptState, Reason
from broker.domain.money import LedgerCategory, LedgerKind, format_usd
from broker.domain.spec import IdleKind, JobSpec, Usd
from broker.reporting.notebook_html import bar_html, table_html, text_html
from broker.reporting.progress import steps
from trainer.contract.base import Config
from trainer.contract.documents import Final, Heartbeat


class AttemptView(Wire):
    """One purchase for a job."""

    id: AttemptId
    number: int
    instance: InstanceName
    state: AttemptState
    reason: Reason | None
    detail: str
    offer: OfferView
    nodes: int = 1
    """Number of machines of this kind that were bought together."""
    hours_p50: float | None
    usd_p50: Decimal | None
    evidence: str = ""
    """Basis of the estimated speed."""
    observed_runs: int = 0
    """Own runs on such a GPU that the estimate used."""
    created_at: datetime
    create_sent_at: datetime | None
    first_beat_at: datetime | None
    ended_at: datetime | None
    reserved_usd: Decimal
    charged_usd: Decimal
    """Dollars charged for machines and traffic."""
    traffic_usd: Decimal = Decimal(0)
    """Part of `charged_usd` for traffic."""
    lost_usd: Decimal = Decimal(0)
    """Part of the machine charges that produced no progress."""
    on_demand_usd: Decimal | None = None
    """Cost of the useful hours on demand at the same cloud; null: that price is unknown."""
    usd_per_hour: Decimal | None = None
    """Current price of one machine in dollars per hour; `offer` has the price at the purchase. null: not read back yet.
    """
    idle: IdleKind | None = None
    """Reason why the machine counts as idle; null: it does not."""
    resume_from: tuple[str, ...]
    """Keys of the manifests offered for resuming, newest first."""
    beat: Heartbeat | None
    """Latest heartbeat of node 0: step, loss, tokens/s."""
    final: Final | None


class JobDetail(JobView):
    """A job with its attempts."""

    spec: JobSpec
    reserved_usd: Decimal
    """Dollars still reserved for the live attempt."""
    storage: StorageView | None = None
    """Stored data; null: not measured yet."""
    ran_out_of_memory: tuple[str, ...] = ()
    """Plans that ran out of memory, oldest first. The current plan needs less, at the same global batch."""
    runs: tuple[AttemptView, ...]
    """Attempts by number. `beat` of the last one is the live progress."""

    def _repr_html_(self) -> str:
        """Return state, progress bar, money and attempts, for notebooks; the receipt of a job that has ended."""
        beats = [run.beat for run in self.runs if run.beat is not None]
        reached = max((end for _, end in map(steps, self.runs) if end is not None), default=0)
        total = max((beat.total_steps for beat in beats), default=0)
        facts = [self.name, self.id, self.state.value, *([f"step {reached} of {total}"] if total else [])]
        if beats and beats[-1].loss is not None:
            facts.append(f"loss {beats[-1].loss:.3f}")
        facts.append(f"{format_usd(self.spent_usd)} of at most {format_usd(self.cap_usd)}")
        quoted = self.runs[0].usd_p50 if self.runs else None
        if quoted is not None and self.state in RESTING_JOB_STATES:
            difference = format_usd(self.spent_usd - quoted)
            facts.append(f"quoted {format_usd(quoted)}, paid {format_usd(self.spent_usd)}, difference {difference}")
        names = ("#", "State", "GPU", "Cloud", "$ per hour", "Quoted", "Paid")
        table = table_html(names, [_cells(run) for run in self.runs]) if self.runs else ""
        return f"<p>{text_html(' · '.join(facts))}</p>{bar_html(reached / total) if total else ''}{table}"


def _cells(run: AttemptView) -> tuple[str, ...]:
    offer, count = run.offer, run.nodes * run.offer.gpus
    return (
        str(run.number),
        f"{run.state.value} {run.reason.value}" if run.reason else run.state.value,
        f"{count} × {offer.accelerator}" if count > 1 else offer.accelerator,
        f"{offer.cloud}{' (simulated)' if offer.simulated else ''} {'spot' if offer.spot else 'on demand'}",
        format_usd((run.usd_per_hour or offer.usd_per_hour) * run.nodes),
        "–" if run.usd_p50 is None else format_usd(run.usd_p50),
        format_usd(run.charged_usd),
    )


class CapChange(Config):
    """A higher cap."""

    cap_usd: Usd


class EventView(Wire):
    seq: int
    """Number of the event within the job, without gaps; the SSE id."""
    at: datetime | None
    kind: str
    message: str
    attempt_id: AttemptId | None
    data: dict[str, Any]


class EventList(Wire):
    items: tuple[EventView, ...]


class LedgerLine(Wire):
    attempt_id: AttemptId | None
    """Attempt that was charged; null: storage, which outlives attempts."""
    kind: LedgerKind
    usd: Decimal
    note: str
    category: LedgerCategory = LedgerCategory.COMPUTE
    """Category of the charge. The cap covers compute and egress."""


class LedgerList(Wire):
    items: tuple[LedgerLine, ...]
