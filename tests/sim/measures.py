"""Durations in virtual seconds, reported in the last line of a run; they are not invariants."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from broker.domain.ids import AttemptId


def attempt_of_machine(machine_id: str) -> AttemptId:
    """Return the attempt of `gb-<installation>-<attempt>`, which `-<node>` follows for all but the first machine."""
    return AttemptId(machine_id.split("-")[2])


@dataclass
class Helpless:
    """Spans in which no broker could act; the first one begins at the start."""

    _over: list[tuple[float, float]] = field(default_factory=list)
    _since: float | None = 0.0

    def unless(self, able: bool, now: float) -> None:
        if able and self._since is not None:
            self._over.append((self._since, now))
            self._since = None
        elif not able and self._since is None:
            self._since = now

    def within(self, since: float, until: float) -> float:
        """Return seconds of a span."""
        spans = list(self._over)
        if self._since is not None:
            spans.append((self._since, until))
        return sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in spans)


@dataclass
class Measures:
    """Leaks and detections. A leak begins when a machine loses its owner: its attempt is terminating or has ended, or
    there is none. It ends when the machine is gone and bills no more."""

    leak_ages: list[float] = field(default_factory=list)
    """Seconds of each leak in which a broker could act."""
    leak_ages_raw: list[float] = field(default_factory=list)
    """Seconds of each leak."""
    detects: list[float] = field(default_factory=list)
    """Seconds from a death without notice until its attempt was terminating, limited to the time in which a broker
    could see the death.
    """
    detects_raw: list[float] = field(default_factory=list)
    """Seconds from a death without notice until its attempt was terminating."""
    _unwanted: dict[str, float] = field(default_factory=dict)
    _lost: dict[AttemptId, float] = field(default_factory=dict)
    _idle: Helpless = field(default_factory=Helpless)
    _blind: Helpless = field(default_factory=Helpless)

    def able(self, *, act: bool, see: bool, now: float) -> None:
        """Record the current abilities. `act`: a broker runs that reaches its database, and the cloud's API is up.
        `see`: the blob store is up as well, which alone distinguishes a death from a job's end."""
        self._idle.unless(act, now)
        self._blind.unless(see, now)

    def unwanted(self, attempt: AttemptId, machines: Sequence[str], now: float) -> None:
        """Record that none of these machines should exist as of now; a death within the attempt counts as noticed."""
        for machine in machines:
            self._unwanted.setdefault(machine, now)
        if (died := self._lost.pop(attempt, None)) is not None:
            self.detects_raw.append(now - died)
            self.detects.append(now - died - self._blind.within(died, now))

    def wanted(self, attempt: AttemptId, machines: Iterable[str]) -> None:
        """End the leaks of the attempt's own machines, because they replace the one that was bought."""
        for machine in machines:
            if attempt_of_machine(machine) == attempt:
                self._unwanted.pop(machine, None)

    def gone(self, machine: str, at: float) -> None:
        if (since := self._unwanted.pop(machine, None)) is not None:
            raw = max(0.0, at - since)
            self.leak_ages_raw.append(raw)
            self.leak_ages.append(max(0.0, raw - self._idle.within(since, at)))

    def forget(self) -> None:
        """Forget unwanted machines and lost attempts, because the database was restored from a backup."""
        self._unwanted.clear()
        self._lost.clear()

    def unseen(self) -> Mapping[AttemptId, float]:
        """Return attempts that lost a machine, and the time since which no broker has noticed."""
        return self._lost

    def whole_again(self, attempt: AttemptId) -> None:
        """Forget a loss: the machine was bought once more or runs again, before a broker noticed its death."""
        self._lost.pop(attempt, None)

    def lost(self, attempt: AttemptId, at: float) -> None:
        """Record that a machine of this attempt died without notice."""
        self._lost.setdefault(attempt, at)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that this share of the values does not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
