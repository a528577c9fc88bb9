"""Actual strikes of each kind of fault: a fault of the plan may find no target."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from broker.domain.ids import JobId

APART_S = 1.0
"""Strikes at the whole installation that are nearer in time than this are noted once; seconds."""


@dataclass
class Strikes:
    """Record of which faults affected which jobs. `now`: virtual seconds."""

    now: Callable[[], float]
    _shared: dict[str, list[float]] = field(default_factory=dict)
    _jobs: dict[str, set[JobId]] = field(default_factory=dict)

    def note(self, kind: str, job: JobId | None = None) -> None:
        """Record a fault. `job`: the affected job; None: every job that is live now."""
        if job is not None:
            self._jobs.setdefault(kind, set()).add(job)
            return
        at, times = self.now(), self._shared.setdefault(kind, [])
        if not times or at - times[-1] >= APART_S:
            times.append(at)

    def lifetimes(self, lives: Mapping[JobId, tuple[float, float]]) -> dict[str, int]:
        """Return the number of lives that met each kind, each life from its first to its last second."""
        kinds = sorted({*self._shared, *self._jobs})
        return {kind: sum(self._met(kind, job, *span) for job, span in lives.items()) for kind in kinds}

    def _met(self, kind: str, job: JobId, since: float, until: float) -> bool:
        if job in self._jobs.get(kind, ()):
            return True
        times = self._shared.get(kind, [])
        place = bisect_left(times, since - APART_S)
        return place < len(times) and times[place] <= until
