"""Money, durations, ages and machines as text of the pages. Pure functions; the templates use them as filters."""

from datetime import datetime
from decimal import Decimal

from broker.api.schemas.offers import OfferView
from broker.domain.formatting import duration as duration
from broker.domain.formatting import visible
from broker.domain.job import Attempt, AttemptState, Job, JobState
from broker.domain.offer import Offer

UNKNOWN = "–"
STATES: dict[JobState, tuple[str, str]] = {
    JobState.AWAITING_APPROVAL: ("awaiting approval", "waiting"),
    JobState.QUEUED: ("waiting", "waiting"),
    JobState.ACTIVE: ("running", "running"),
    JobState.RECOVERING: ("recovering", "preempted"),
    JobState.SUCCEEDED: ("succeeded", "succeeded"),
    JobState.CAPPED: ("capped", "capped"),
    JobState.CANCELLED: ("cancelled", "cancelled"),
    JobState.FAILED: ("failed", "failed"),
}
"""Word and shape of each state of a job."""
AGES: tuple[tuple[float, str], ...] = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
SIZES: tuple[tuple[int, str], ...] = ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB"))
ENDING = frozenset({AttemptState.DRAINING, AttemptState.TERMINATING})


def money(value: Decimal | float | None) -> str:
    """Return dollars: two decimals from one dollar on, four below."""
    if value is None:
        return UNKNOWN
    return f"${value:,.2f}" if not -1 < float(value) < 1 or not value else f"${value:.4f}"


def ago(then: datetime | None, now: datetime) -> str:
    """Return the age of a time in its largest unit: `5 min ago`."""
    if then is None:
        return UNKNOWN
    seconds = (now - then).total_seconds()
    if seconds < 5:
        return "now"
    unit, name = next(((unit, name) for unit, name in AGES if seconds >= unit), AGES[-1])
    return f"{seconds // unit:.0f} {name} ago"


def moment(at: datetime | None) -> str:
    """Return a time in UTC to the second."""
    return UNKNOWN if at is None else f"{at:%Y-%m-%d %H:%M:%S} UTC"


def clock(at: datetime | None, now: datetime) -> str:
    """Return hour and minute in UTC, with the date unless it is today's."""
    if at is None:
        return UNKNOWN
    return f"{at:%H:%M}" if at.date() == now.date() else f"{at:%d %b %H:%M}"


def size(count: float | None) -> str:
    """Return bytes as whole or tenths of GiB, or smaller units."""
    if count is None:
        return UNKNOWN
    for unit, name in SIZES:
        if count >= unit:
            return f"{count / unit:.0f} {name}" if count >= 10 * unit else f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"


def gpu(offer: Offer | OfferView, nodes: int = 1) -> str:
    """Return `2 × l40s`, or for several machines `3 nodes of 2 × l40s`."""
    machines = f"{nodes} nodes of " if nodes > 1 else ""
    count = f"{offer.gpus} × " if offer.gpus > 1 else ""
    return f"{machines}{count}{offer.accelerator}"


def cloud(offer: Offer | OfferView) -> str:
    """Return an offer's cloud; a simulated one is labelled."""
    return f"{offer.cloud} (simulated)" if offer.simulated else offer.cloud


def market(offer: Offer | OfferView) -> str:
    return "spot" if offer.spot else "on demand"


def state(job: Job, attempt: Attempt | None = None) -> tuple[str, str]:
    """Return (word, shape) of a job's state; of an active job, the state of its attempt."""
    word, shape = STATES[job.state]
    if job.state is not JobState.ACTIVE or attempt is None or not attempt.live:
        return word, shape
    if attempt.state in ENDING or job.stop_requested:
        return attempt.state.value, "draining"
    return attempt.state.value, "running" if attempt.state is AttemptState.TRAINING else "starting"


def text(value: str) -> str:
    """Return a text of a user or a machine without control characters; lines and tabs stay."""
    return visible(value, keep="\n\t")
