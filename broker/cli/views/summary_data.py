"""Summary of a job, computed from its attempts and artifacts. Pure: it only transforms documents."""

from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from broker.api.schemas.jobs import AttemptView, JobDetail
from broker.domain.job import Reason
from broker.domain.money import ZERO
from broker.reporting.progress import steps, steps_redone

PICTURE = "loss.png"
INTERRUPTIONS = frozenset({Reason.PREEMPTED, Reason.LOST})


@dataclass(frozen=True, kw_only=True)
class AttemptLine:
    """One attempt of a job. Steps are optimizer steps, None if it never trained."""

    number: int
    machine: str
    start_step: int | None
    end_step: int | None
    why: str
    usd: Decimal
    usd_on_demand: Decimal | None
    """Cost of the useful hours on demand at the same cloud; None if that price is unknown."""
    usd_compared: Decimal
    """Part of `usd` that `usd_on_demand` is compared with: the charges for machines, those for lost work included."""
    usd_lost: Decimal
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt with the completions of the base model and the tuned model."""

    prompt: str
    base: str
    tuned: str


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Result and cost of a job."""

    job: str
    name: str
    state: str
    reason: str
    attempts: tuple[AttemptLine, ...]
    preemptions: int
    steps: int
    steps_redone: int
    """Steps that were lost with a machine and done a second time."""
    usd: Decimal
    usd_on_demand: Decimal | None
    usd_compared: Decimal
    usd_lost: Decimal
    """Part of `usd_compared` that produced no progress."""
    cap_usd: Decimal
    seconds: float
    heldout_loss_before: float | None
    heldout_loss_after: float | None
    losses: tuple[tuple[int, float], ...] = ()
    samples: tuple[Sample, ...] = ()
    adapter: str | None = None
    """Path of the downloaded adapter or model; None before the download."""
    picture: str | None = None
    """Path of the loss curve as a PNG; None if matplotlib is not installed."""

    def at(self, folder: Path) -> "Summary":
        """Return a copy with the path of the downloaded results: `adapter/` or `model/` below `folder`, or `folder`."""
        results = next((f for f in (folder / "adapter", folder / "model") if f.is_dir()), folder)
        picture = folder / PICTURE
        return replace(self, adapter=str(results), picture=str(picture) if picture.exists() else None)

    def document(self) -> dict[str, Any]:
        """Return JSON values, with money as decimal strings."""
        document: dict[str, Any] = TypeAdapter(Summary).dump_python(self, mode="json")
        return document


def summarise(
    job: JobDetail, machines: tuple[str, ...], losses: tuple[tuple[int, float], ...], samples: tuple[Sample, ...]
) -> Summary:
    """Return the summary of a job.

    `machines`: a text for the machines of each attempt; `losses`: (step, loss) of the job's metrics.
    """
    final = job.runs[-1].final if job.runs else None
    lines = tuple(_line(run, text) for run, text in zip(job.runs, machines, strict=True))
    ended = job.finished_at or max((r.ended_at for r in job.runs if r.ended_at), default=job.created_at)
    paid = [line for line in lines if line.usd_compared]
    on_demand = [line.usd_on_demand for line in paid]
    return Summary(
        job=job.id,
        name=job.name,
        state=job.state.value,
        reason=job.reason,
        attempts=lines,
        preemptions=sum(r.reason in INTERRUPTIONS for r in job.runs),
        steps=max((line.end_step for line in lines if line.end_step is not None), default=0),
        steps_redone=steps_redone(job.runs),
        usd=job.spent_usd,
        usd_on_demand=None if None in on_demand else sum((u for u in on_demand if u is not None), ZERO),
        usd_compared=sum((line.usd_compared for line in paid), ZERO),
        usd_lost=sum((line.usd_lost for line in paid), ZERO),
        cap_usd=job.cap_usd,
        seconds=(ended - job.created_at).total_seconds(),
        heldout_loss_before=_first_before(job.runs),
        heldout_loss_after=final.heldout_loss_after if final else None,
        losses=losses,
        samples=samples,
    )


def _line(run: AttemptView, machine: str) -> AttemptLine:
    start, end = steps(run)
    seconds = (run.ended_at - run.create_sent_at).total_seconds() if run.ended_at and run.create_sent_at else 0.0
    return AttemptLine(
        number=run.number,
        machine=machine,
        start_step=start,
        end_step=end,
        why=(run.reason.value if run.reason else run.state.value) + (f": {run.detail}" if run.detail else ""),
        usd=run.charged_usd,
        usd_on_demand=run.on_demand_usd,
        usd_compared=run.charged_usd - run.traffic_usd,
        usd_lost=run.lost_usd,
        seconds=seconds,
    )


def _first_before(runs: tuple[AttemptView, ...]) -> float | None:
    finals = (r.final.heldout_loss_before for r in reversed(runs) if r.final is not None)
    return next((loss for loss in finals if loss is not None), None)
