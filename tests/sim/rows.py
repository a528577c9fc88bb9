"""Records of rows and leases, with which the invariants compare later writes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from broker.domain.ids import AttemptId, JobId
from broker.domain.job import Attempt, Job


@dataclass(frozen=True, kw_only=True)
class Held:
    """Lease as granted; `until` in virtual seconds of the database's clock."""

    owner: str
    epoch: int
    until: float


@dataclass(frozen=True, kw_only=True)
class Before:
    """Rows just before a write."""

    jobs: dict[JobId, Job]
    attempts: dict[AttemptId, Attempt]


class Leases:
    """Holders of leased rows, as the store has returned them."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    def claimed(self, owner: str, rows: Sequence[Job | Attempt], now: float, until: float) -> Iterator[str]:
        """Record claims; yield a message for each row that another owner still holds."""
        for row in rows:
            other = self._held.get(row.id)
            if other is not None and other.until > now:
                yield f"{row.id} claimed by {owner}, held by {other.owner}"
            self._held[row.id] = Held(owner=owner, epoch=row.epoch, until=until)

    def released(self, rows: Sequence[Job | Attempt]) -> None:
        """Record releases of rows whose epoch is still that of their claim; ignore others."""
        for row in rows:
            if (held := self._held.get(row.id)) is not None and held.epoch == row.epoch:
                del self._held[row.id]

    def ended(self, owner: str) -> None:
        self._held = {row_id: held for row_id, held in self._held.items() if held.owner != owner}
