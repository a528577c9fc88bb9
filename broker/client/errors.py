"""What can go wrong between the client and the daemon.

ClientError
├── Unreachable   nothing answers, or not in time; nothing is known about what was asked
├── ApiError      the daemon refused: an RFC 9457 problem
└── Damaged       a file came with other bytes than its manifest says
"""

from broker.api.models import Problem


class ClientError(Exception):
    """Base of all."""


class Unreachable(ClientError):
    """No daemon answers at the address."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"no daemon answers at {url} ({why})")
        self.url = url


class ApiError(ClientError):
    """The daemon's refusal."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail or problem.title)
        self.problem = problem

    @property
    def status(self) -> int:
        return self.problem.status


class Damaged(ClientError):
    """Other bytes than the manifest says."""
