"""What can go wrong between the client and the daemon.

ClientError
├── Unreachable   nothing answers, or not in time; nothing is known about what was asked
├── ApiError      the daemon refused: an RFC 9457 problem
├── BrokenOff     a file did not come to its end
├── Damaged       a file came with other bytes than its manifest says
├── NotSaved      a file cannot be kept on this machine
├── Misconfigured an address, a token or a file that holds them is unusable; nothing was asked
└── NotFinished   a job that was waited for ended without its result
"""

from broker.api.schemas.base import ProblemView
from broker.api.schemas.jobs import JobDetail
from broker.domain.job import JobState


class ClientError(Exception):
    """Base of all."""


class DaemonUnreachable(ClientError):
    """No daemon answers at the address."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"no daemon answers at {url} ({why})")
        self.url = url


class ApiError(ClientError):
    """The daemon's refusal."""

    def __init__(self, problem: ProblemView) -> None:
        told = "; ".join(f"{p.field}: {p.message}" if p.field else p.message for p in problem.errors)
        super().__init__(told or problem.detail or problem.title)
        self.problem = problem

    @property
    def status(self) -> int:
        return self.problem.status


class BrokenOff(ClientError):
    """A file whose answer ended before its last byte; nothing of it was kept."""


class Damaged(ClientError):
    """Other bytes than the manifest says."""


class NotSaved(ClientError):
    """A file cannot be kept: where, why and the fix."""


class Misconfigured(ClientError):
    """An address, a token or a file that holds them: where, what and the fix."""


class NotFinished(ClientError):
    """A job that was waited for failed, was cancelled or reached its cap."""

    def __init__(self, job: JobDetail) -> None:
        fix = f"; `gpubroker cap {job.id} USD` lets it go on" if job.state is JobState.CAPPED else ""
        super().__init__(f"job {job.id} is {job.state.value}: {job.reason or 'see gpubroker events'}{fix}")
        self.job = job
