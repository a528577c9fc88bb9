"""The events of a job, followed until it has ended, and its metrics: journal, latest heartbeat and interruptions."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from weakref import WeakValueDictionary

from broker.api.core.auth import Caller
from broker.api.core.problems import NotFound
from broker.api.schemas.metrics import InterruptionView, MetricsView
from broker.api.service.content import Content
from broker.api.service.jobs import Service
from broker.domain.ids import JobId
from broker.domain.job import RESTING_JOB_STATES, Attempt, Event, Job, Reason
from broker.reporting.metrics_series import MetricPoint, downsampled, metric_points
from broker.reporting.progress import steps
from broker.runtime.cpu_threads import CpuThreads
from trainer.contract.checkpoint_format import METRICS

BATCH = 500
"""Events that are read at once."""


async def follow_events(service: Service, caller: Caller, job: Job, after: int) -> AsyncIterator[Event | Job | None]:
    """Yield every event with a higher seq, then the ended job. Yields None whenever there is nothing new.

    The job is read before its events, because all events of an ended job are already written.
    """
    store = service.rows(caller)
    while True:
        job = await store.job(job.id) or job
        events = await store.events(job.id, after=after, limit=BATCH)
        for event in events:
            after = event.seq
            yield event
        if events:
            continue
        if job.state in RESTING_JOB_STATES:
            yield job
            return
        yield None
        await store.wait(f"job/{job.id}", service.settings.poll_s)


JOURNAL_BYTES = 8 << 20
"""Bytes of a journal's end that are read; about 40,000 steps."""
MAX_READS = 2
"""Maximum number of concurrent reads of journals, at most one of each team."""


class JobMetricsReader:
    """Reads the metrics of runs. A read takes a few times JOURNAL_BYTES of memory and a second of CPU in a thread."""

    def __init__(self, service: Service, content: Content) -> None:
        self.threads = CpuThreads()
        self._service = service
        self._content = content
        self._reads = asyncio.Semaphore(MAX_READS)
        self._teams: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def view(self, caller: Caller, job_id: JobId, *, after: int, points: int) -> MetricsView:
        """Return the steps after `after`, at most `points` of them. Raises NotFound, Deleted, Corrupt, Busy."""
        job = await self._service.job(caller, job_id)
        attempts = await self._service.attempts(caller, job)
        turn = self._teams.setdefault(caller.team, asyncio.Semaphore(1))
        async with turn, self._reads:
            try:
                raw, skipped = await self._content.artifact_end(caller, job_id, METRICS, JOURNAL_BYTES)
            except NotFound:  # before the first checkpoint, and of a script
                raw, skipped = b"", 0
            compute = partial(_view, raw, skipped, attempts, after, points)
            return await self.threads.of_team(caller.team)(compute)


def _view(raw: bytes, skipped: int, attempts: Sequence[Attempt], after: int, points: int) -> MetricsView:
    """Return the steps of the journal's end, which may begin within a line."""
    series = metric_points(raw.partition(b"\n")[2] if skipped else raw, after)
    series += _live(attempts, max(after, series[-1].step if series else 0))
    points_shown = downsampled(series, points)
    return MetricsView(
        step=tuple(p.step for p in points_shown),
        attempt=tuple(p.attempt for p in points_shown),
        time=tuple(p.time for p in points_shown),
        loss=tuple(p.loss for p in points_shown),
        lr=tuple(p.lr for p in points_shown),
        tokens_per_s=tuple(p.tokens_per_s for p in points_shown),
        total=len(series),
        skipped_bytes=skipped,
        interruptions=tuple(_interruptions(attempts)),
    )


def _live(attempts: Sequence[Attempt], last: int) -> list[MetricPoint]:
    """Return the step of the latest heartbeat, if the journal has not reached it."""
    beats = [(a.number, a.beat) for a in attempts[-1:] if a.beat is not None and a.beat.step > last]
    return [
        MetricPoint(step=b.step, attempt=n, time=None, loss=b.loss, lr=None, tokens_per_s=b.tokens_per_s)
        for n, b in beats
    ]


def _interruptions(attempts: Sequence[Attempt]) -> list[InterruptionView]:
    """Return the steps at which attempts ended before the job was done."""
    return [
        InterruptionView(attempt=a.number, step=end, reason=a.reason)
        for a, end in ((a, steps(a)[1]) for a in attempts)
        if end is not None and a.reason is not None and a.reason is not Reason.COMPLETED
    ]
