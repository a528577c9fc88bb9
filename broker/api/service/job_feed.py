"""Follows the events of a job until it has ended."""

from collections.abc import AsyncIterator

from broker.api.core.auth import Caller
from broker.api.service.jobs import Service
from broker.domain.job import RESTING_JOB_STATES, Event, Job

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
