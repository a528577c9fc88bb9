"""What is remembered of rows while they are watched."""

from dataclasses import dataclass

from broker.domain.ids import AttemptId, JobId
from broker.domain.job import Attempt, Job


@dataclass(frozen=True, kw_only=True)
class Held:
    """A lease as it was given; `until` in virtual seconds of the database's clock."""

    process: str
    epoch: int
    until: float


@dataclass(frozen=True, kw_only=True)
class Before:
    """Rows as they were right before a write."""

    jobs: dict[JobId, Job]
    attempts: dict[AttemptId, Attempt]
