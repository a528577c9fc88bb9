"""Chunks of a job's log, and the position of a reader in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from broker.domain.errors import InvalidInput, Problem
from broker.domain.ids import AttemptId
from broker.domain.job import Attempt


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One object of a log, as a listing shows it."""

    key: str
    node: int
    boot: str
    number: int
    written_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Position:
    """Position of a log reader: an attempt, and the last chunk of each agent start. Its text is the SSE id."""

    attempt: AttemptId | None = None
    last_read: tuple[tuple[str, int], ...] = ()
    """(`<node>/<boot>`, number of the last chunk read) of each start of an agent."""

    def __str__(self) -> str:
        return ";".join([self.attempt or "", *(f"{boot}-{n}" for boot, n in self.last_read)])

    @classmethod
    def parse(cls, text: str) -> "Position":
        """Return the position that a text describes. Raises InvalidInput."""
        attempt, *parts = text.split(";")
        try:
            last_read = [(boot, int(n)) for boot, _, n in (part.rpartition("-") for part in parts)]
        except ValueError:
            raise InvalidInput(Problem(field="Last-Event-ID", message="is not one of ours; leave it out")) from None
        return cls(attempt=AttemptId(attempt) if attempt else None, last_read=tuple(last_read))

    def current(self, attempts: Sequence[Attempt]) -> Attempt | None:
        """Return the attempt to read: the one of this position, or the latest for a new reader."""
        known = next((a for a in attempts if a.id == self.attempt), None)
        return known or (attempts[-1] if attempts else None)

    def is_new(self, attempt: AttemptId, chunk: Chunk) -> bool:
        return attempt != self.attempt or chunk.number > dict(self.last_read).get(f"{chunk.node}/{chunk.boot}", -1)

    def after(self, attempt: AttemptId, chunk: Chunk) -> "Position":
        last_read = dict(self.last_read) if attempt == self.attempt else {}
        last_read[f"{chunk.node}/{chunk.boot}"] = chunk.number
        return Position(attempt=attempt, last_read=tuple(sorted(last_read.items())))


@dataclass(frozen=True, kw_only=True)
class LogPiece:
    """Text of one chunk, with the position after it."""

    position: Position
    attempt: int
    node: int
    text: str
