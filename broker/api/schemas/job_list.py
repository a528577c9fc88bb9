"""Jobs of a list on the wire. Kept apart from a job's details, because `gpubroker ls` needs no spec."""

from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal

from broker.api.schemas.base import Wire
from broker.api.schemas.job_data import ForecastView, JobMachineView
from broker.domain.ids import JobId
from broker.domain.job import JobState


class JobView(Wire):
    """A job in a list."""

    id: JobId
    name: str
    team: str
    owner: str
    state: JobState
    reason: str
    """Reason why the job waits, or how it ended, in one line."""
    labels: dict[str, str]
    created_at: datetime
    finished_at: datetime | None
    cap_usd: Decimal
    spent_usd: Decimal
    attempts: int
    retries_used: int
    stop_requested: bool
    retry_of: JobId | None
    forecast: ForecastView | None = None
    """Forecast of a running job; null: not known yet."""
    machine: JobMachineView | None = None
    """Machines of the latest attempt, in lists and details; null: none was bought, or the answer is that of a change.
    """


class JobPage(Wire):
    items: tuple[JobView, ...]
    """Jobs, newest first."""
    next: str | None
    """Cursor of the next page for `?cursor=`; null on the last page."""

    def __iter__(self) -> Iterator[JobView]:  # type: ignore[override]
        """Iterate over the jobs, as in `for job in client.jobs()`."""
        return iter(self.items)
