"""How long things took, in virtual seconds: no invariants, but what the last line of a run tells."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from broker.domain.ids import AttemptId


def attempt_of_machine(machine_id: str) -> AttemptId:
    """`gb-<installation>-<attempt>`, with `-<node>` behind it for all but the first machine."""
    return AttemptId(machine_id.split("-")[2])


@dataclass
class Measures:
    leak_ages: list[float] = field(default_factory=list)
    detects: list[float] = field(default_factory=list)
    _unwanted: dict[str, float] = field(default_factory=dict)
    _lost: dict[AttemptId, float] = field(default_factory=dict)

    def unwanted(self, attempt: AttemptId, machines: Sequence[str], now: float) -> None:
        """From here on none of these machines should exist; what had died of the attempt was noticed."""
        for machine in machines:
            self._unwanted.setdefault(machine, now)
        if (died := self._lost.pop(attempt, None)) is not None:
            self.detects.append(now - died)

    def gone(self, machine: str, at: float) -> None:
        if (since := self._unwanted.pop(machine, None)) is not None:
            self.leak_ages.append(max(0.0, at - since))

    def lost(self, attempt: AttemptId, at: float) -> None:
        """A machine of this attempt died, and nobody was told."""
        self._lost.setdefault(attempt, at)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of them does not pass; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
