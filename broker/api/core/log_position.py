"""Chunks of a job's log, and the position of a reader in them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from broker.domain.errors import InvalidInput, Problem
from broker.domain.ids import AttemptId
from broker.domain.job import Attempt
from broker.ports import BlobInfo

CHUNK_KEY = re.compile(r"([0-9]{1,3})/([A-Za-z0-9]{1,16})-([0-9]{10})")
"""Key of a chunk below the prefix of its log. A host writes it, and it becomes part of an event's id."""
MAX_STARTS = 150
"""Starts of agents of an attempt whose log is read. Their positions fit into the header `Last-Event-ID`."""


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

    def unread(self, attempt: AttemptId, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Return the chunks of an attempt after this position."""
        if attempt != self.attempt:
            return list(chunks)
        last_read = dict(self.last_read)
        return [chunk for chunk in chunks if chunk.number > last_read.get(f"{chunk.node}/{chunk.boot}", -1)]

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


def chunks_of(listed: Iterable[BlobInfo], prefix: str) -> list[Chunk]:
    """Return the chunks among the listed objects of a log, in the order in which they were written.

    Other names, and starts beyond MAX_STARTS, are left out: a host can write any number of objects.
    """
    starts: set[tuple[int, str]] = set()
    chunks: list[Chunk] = []
    for info in listed:
        match = CHUNK_KEY.fullmatch(info.key.removeprefix(prefix))
        if match is None:
            continue
        node, boot, number = int(match[1]), match[2], int(match[3])
        if len(starts) < MAX_STARTS:
            starts.add((node, boot))
        if (node, boot) in starts:
            chunks.append(Chunk(key=info.key, node=node, boot=boot, number=number, written_at=info.written_at))
    return sorted(chunks, key=lambda c: (c.node, c.boot, c.number))
