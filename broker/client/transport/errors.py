"""Errors of the client.

ClientError
├── DaemonUnreachable  no answer in time; the outcome of the request is unknown
├── ApiError           the daemon refused: an RFC 9457 problem
├── BrokenOff          a file's download ended early
├── Damaged            a file's bytes differ from its manifest
├── NotSaved           a file cannot be saved on this machine
├── Misconfigured      an address, a token or a file that holds them is invalid; nothing was sent
└── NotFinished        a job ended without its result
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from broker.api.schemas.base import ProblemView
    from broker.api.schemas.jobs import JobDetail


class ClientError(Exception):
    """Base class of all errors of the client."""


class DaemonUnreachable(ClientError):
    """No daemon answers at the address."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"no daemon answers at {url} ({why})")
        self.url = url


class ApiError(ClientError):
    """The daemon refused the request."""

    def __init__(self, problem: "ProblemView") -> None:
        details = "; ".join(f"{p.field}: {p.message}" if p.field else p.message for p in problem.errors)
        super().__init__(details or problem.detail or problem.title)
        self.problem = problem

    @property
    def status(self) -> int:
        return self.problem.status


class BrokenOff(ClientError):
    """The answer ended before the file's last byte; nothing was stored."""


class Damaged(ClientError):
    """The file's bytes differ from its manifest."""


class NotSaved(ClientError):
    """The file cannot be saved; the message has place, reason and fix."""


class Misconfigured(ClientError):
    """An address, a token or a file that holds them is invalid; the message has place, fault and fix."""


class NotFinished(ClientError):
    """The job failed, was cancelled or reached its cap."""

    def __init__(self, job: "JobDetail") -> None:
        fix = f"; `gpubroker cap {job.id} USD` lets it resume" if job.state == "capped" else ""
        super().__init__(f"job {job.id} is {job.state.value}: {job.reason or 'see gpubroker events'}{fix}")
        self.job = job
