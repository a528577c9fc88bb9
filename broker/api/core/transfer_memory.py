"""Limit on the memory of logs and results that are being sent.

A client that reads slowly keeps its answer in the daemon's memory. Forty slow readers of a log filled 1 GiB.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from broker.api.core.problems import TooMany

TEAM_BYTES = 160 << 20
"""Maximum bytes of a team. The largest log takes 130 MiB."""
TEAMS = 2
"""Number of teams that may take their maximum at once."""


class TransferMemory:
    """Counts the bytes of answers by team."""

    def __init__(self) -> None:
        self._teams: Counter[str] = Counter()

    @property
    def bytes(self) -> int:
        """Bytes of all teams."""
        return self._teams.total()

    @contextmanager
    def hold(self, team: str) -> Iterator["HeldMemory"]:
        """Count the memory of one answer during the block."""
        held = HeldMemory(self, team)
        try:
            yield held
        finally:
            self._teams -= Counter({team: held.bytes})

    def add(self, team: str, size: int) -> None:
        """Count more bytes of a team. Raises TooMany beyond a limit; then nothing is counted."""
        if self._teams[team] + size > TEAM_BYTES:
            raise TooMany(f"downloads of team {team!r} take the most memory, {TEAM_BYTES >> 20} MiB; end one of them")
        if self.bytes + size > TEAMS * TEAM_BYTES:
            raise TooMany("downloads take as much memory as they may; try again when one has ended")
        self._teams[team] += size


class HeldMemory:
    """Memory of one answer. `bytes`: its size so far."""

    def __init__(self, memory: TransferMemory, team: str) -> None:
        self._memory = memory
        self._team = team
        self.bytes = 0

    def add(self, size: int) -> None:
        """Count more bytes before they are read. Raises TooMany."""
        self._memory.add(self._team, size)
        self.bytes += size
