"""What is remembered of rows while they are watched."""

from collections.abc import Iterable, Iterator, Sequence
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


class Leases:
    """Who holds which row, as the store has said."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    def claimed(self, process: str, rows: Sequence[Job | Attempt], now: float, until: float) -> Iterator[str]:
        """What is wrong with that: somebody holds it."""
        for row in rows:
            other = self._held.get(row.id)
            if other is not None and other.until > now:
                yield f"{row.id} claimed by {process}, held by {other.process}"
            self._held[row.id] = Held(process=process, epoch=row.epoch, until=until)

    def released(self, rows: Sequence[Job | Attempt]) -> None:
        """Under the epoch that they were claimed in; else nothing."""
        for row in rows:
            if (held := self._held.get(row.id)) is not None and held.epoch == row.epoch:
                del self._held[row.id]

    def released_all(self, process: str, of: Iterable[str]) -> None:
        for row_id in of:
            if (held := self._held.get(row_id)) is not None and held.process == process:
                del self._held[row_id]
