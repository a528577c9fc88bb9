"""How long things took, in virtual seconds: no invariants, but what the last line of a run tells."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from broker.domain.ids import AttemptId


def attempt_of_machine(machine_id: str) -> AttemptId:
    """`gb-<installation>-<attempt>`, with `-<node>` behind it for all but the first machine."""
    return AttemptId(machine_id.split("-")[2])


@dataclass
class Helpless:
    """When nobody could do a thing; from the start on, nobody can."""

    _over: list[tuple[float, float]] = field(default_factory=list)
    _since: float | None = 0.0

    def unless(self, able: bool, now: float) -> None:
        if able and self._since is not None:
            self._over.append((self._since, now))
            self._since = None
        elif not able and self._since is None:
            self._since = now

    def within(self, since: float, until: float) -> float:
        """Seconds of a span."""
        spans = list(self._over)
        if self._since is not None:
            spans.append((self._since, until))
        return sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in spans)


@dataclass
class Measures:
    """A machine is leaked from when nobody wants it any more (its attempt is on its way out, has ended, or is nobody's)
    until it is gone and bills no more."""

    leak_ages: list[float] = field(default_factory=list)
    """Of that, the time in which somebody could act."""
    leak_ages_raw: list[float] = field(default_factory=list)
    """All of it."""
    detects: list[float] = field(default_factory=list)
    """From a death without notice until its attempt was on its way out: the time in which somebody could see it."""
    detects_raw: list[float] = field(default_factory=list)
    """All of it."""
    _unwanted: dict[str, float] = field(default_factory=dict)
    _lost: dict[AttemptId, float] = field(default_factory=dict)
    _idle: Helpless = field(default_factory=Helpless)
    _blind: Helpless = field(default_factory=Helpless)

    def able(self, *, act: bool, see: bool, now: float) -> None:
        """From now on. `act`: a broker runs that reaches its database, and the cloud's API is not down; `see`: nor is
        the blob store, which alone tells a death from a job's end."""
        self._idle.unless(act, now)
        self._blind.unless(see, now)

    def unwanted(self, attempt: AttemptId, machines: Sequence[str], now: float) -> None:
        """From here on none of these machines should exist; what had died of the attempt was noticed."""
        for machine in machines:
            self._unwanted.setdefault(machine, now)
        if (died := self._lost.pop(attempt, None)) is not None:
            self.detects_raw.append(now - died)
            self.detects.append(now - died - self._blind.within(died, now))

    def wanted(self, attempt: AttemptId, machines: Iterable[str]) -> None:
        """Of these, the attempt's take the place of the one that was bought."""
        for machine in machines:
            if attempt_of_machine(machine) == attempt:
                self._unwanted.pop(machine, None)

    def gone(self, machine: str, at: float) -> None:
        if (since := self._unwanted.pop(machine, None)) is not None:
            raw = max(0.0, at - since)
            self.leak_ages_raw.append(raw)
            self.leak_ages.append(max(0.0, raw - self._idle.within(since, at)))

    def forget(self) -> None:
        """Nobody knows any more of what was wanted, or was lost."""
        self._unwanted.clear()
        self._lost.clear()

    def unseen(self) -> Mapping[AttemptId, float]:
        """Attempts that lost a machine, and since when nobody has noticed."""
        return self._lost

    def whole_again(self, attempt: AttemptId) -> None:
        """What died before anybody saw it was bought once more, or runs again: nothing is lost any more."""
        self._lost.pop(attempt, None)

    def lost(self, attempt: AttemptId, at: float) -> None:
        """A machine of this attempt died, and nobody was told."""
        self._lost.setdefault(attempt, at)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of them does not pass; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
