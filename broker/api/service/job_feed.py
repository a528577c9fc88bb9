"""The events of a job, followed until it has ended, and its metrics: journal, latest heartbeat and interruptions."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from broker.api.core.auth import Caller
from broker.api.core.problems import NotFound, TooLarge
from broker.api.schemas.metrics import InterruptionView, MetricsView
from broker.api.service.content import Content
from broker.api.service.jobs import Service
from broker.domain.ids import JobId
from broker.domain.job import RESTING_JOB_STATES, Attempt, Event, Job, Reason
from broker.reporting.metrics_series import MetricPoint, downsampled, metric_points
from broker.reporting.progress import steps
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


JOURNAL_BYTES = 64 << 20
"""Longest journal that is read; about 300,000 steps."""


async def run_metrics(
    service: Service, content: Content, caller: Caller, job_id: JobId, *, after: int, points: int
) -> MetricsView:
    """Return the steps after `after`, at most `points` of them. Raises NotFound, Deleted, Corrupt, TooLarge."""
    job = await service.job(caller, job_id)
    attempts = await service.attempts(caller, job)
    raw = await _journal(content, caller, job_id)
    series = await asyncio.to_thread(metric_points, raw, after)
    series += _live(attempts, max(after, series[-1].step if series else 0))
    shown = downsampled(series, points)
    return MetricsView(
        step=tuple(p.step for p in shown),
        attempt=tuple(p.attempt for p in shown),
        time=tuple(p.time for p in shown),
        loss=tuple(p.loss for p in shown),
        lr=tuple(p.lr for p in shown),
        tokens_per_s=tuple(p.tokens_per_s for p in shown),
        total=len(series),
        interruptions=tuple(_interruptions(attempts)),
    )


async def _journal(content: Content, caller: Caller, job_id: JobId) -> bytes:
    """Return the journal of the last committed checkpoint; empty if there is none, as for a script."""
    try:
        file, pieces = await content.artifact(caller, job_id, METRICS)
    except NotFound:
        return b""
    if file.bytes > JOURNAL_BYTES:
        await pieces.aclose()
        raise TooLarge(f"{METRICS} has {file.bytes} bytes; download it with `gpubroker artifacts {job_id}`")
    return b"".join([piece async for piece in pieces])


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
