"""Follow a job until it ends: its events and its progress, across restarts of the daemon."""

import asyncio

from broker.api.schemas.jobs import JobDetail
from broker.cli.core.exit_codes import Capped, JobFailed
from broker.cli.core.output import Output
from broker.cli.views.progress import Display, display, view
from broker.client.async_client import AsyncClient
from broker.client.transport.errors import DaemonUnreachable
from broker.domain.job import JobState

RETRY_FOR_S = 900.0
"""Seconds for which a watcher waits for a stopped daemon."""
POLL_S = 1.0


async def watch(client: AsyncClient, job: str, out: Output) -> JobDetail:
    """Follow the job and return it once it has ended or is capped.

    Raises DaemonUnreachable when the daemon does not answer within the client's `retry_for_s`.
    """
    with display(out) as screen:
        polling = asyncio.create_task(_poll(client, job, screen))
        try:
            async for event in client.events(job):
                screen.event(event)
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
    return await client.job(job)


async def _poll(client: AsyncClient, job: str, screen: Display) -> None:
    """Show the job's progress, or that no daemon answers, until cancelled.

    Any other error ends the polling without a message, because the event stream raises it too.
    """
    while True:
        try:
            async with asyncio.timeout(POLL_S * 5):
                screen.show(view(await client.job(job)))
        except (TimeoutError, DaemonUnreachable):
            screen.note("no daemon answers; the job keeps running, waiting for `gpubroker serve`")
        await asyncio.sleep(POLL_S)


def raise_for_state(job: JobDetail) -> None:
    """Raise the error whose exit code matches the job's state; return for a success or a running job.

    The summary was the command's document, so `--json` writes no error document.
    """
    match job.state:
        case JobState.FAILED | JobState.CANCELLED:
            raise JobFailed(f"job {job.id} {job.state}: {job.reason or 'see gpubroker events'}", is_in_document=True)
        case JobState.CAPPED:
            fix = f"`gpubroker cap {job.id} USD` raises it"
            raise Capped(f"job {job.id} reached its cap: {job.reason}; {fix}", is_in_document=True)
