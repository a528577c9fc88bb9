"""Follow a job to its rest: events as they happen and its progress, through restarts of the daemon."""

import asyncio

from broker.api.schemas.jobs import JobDetail
from broker.cli.core.exit_codes import Capped, JobFailed
from broker.cli.core.output import Output
from broker.cli.views.progress import Display, display, view
from broker.client.async_client import AsyncClient
from broker.client.transport.errors import DaemonUnreachable
from broker.domain.job import JobState

PATIENCE_S = 900.0
"""A watcher waits so long for a daemon that was stopped."""
LOOK_S = 1.0


async def watch(client: AsyncClient, job: str, out: Output) -> JobDetail:
    """The job at rest. `client` must have patience; raises Unreachable when it is at its end."""
    with display(out) as shown:
        looking = asyncio.create_task(_look(client, job, shown))
        try:
            async for event in client.events(job):
                shown.event(event)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
    return await client.job(job)


async def _look(client: AsyncClient, job: str, shown: Display) -> None:
    """A silent daemon is told at once and waited for; everything else is the event stream's to raise."""
    while True:
        try:
            async with asyncio.timeout(LOOK_S * 5):
                shown.show(view(await client.job(job)))
        except (TimeoutError, DaemonUnreachable):
            shown.note("no daemon answers; the job goes on, waiting for `gpubroker serve`")
        await asyncio.sleep(LOOK_S)


def verdict(job: JobDetail) -> None:
    """Raises what the job's end means for the exit code; nothing for a success or a job that still runs.

    The summary was the command's document, so that these are told already.
    """
    match job.state:
        case JobState.FAILED | JobState.CANCELLED:
            raise JobFailed(f"job {job.id} {job.state}: {job.reason or 'see gpubroker events'}", told=True)
        case JobState.CAPPED:
            fix = f"`gpubroker cap {job.id} USD` raises it"
            raise Capped(f"job {job.id} reached its cap: {job.reason}; {fix}", told=True)
