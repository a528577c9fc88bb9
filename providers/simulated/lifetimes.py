"""Lifetimes of simulated spot machines: scripted first, then drawn from the offer's hazard."""

import os
from pathlib import Path

from broker.domain.ids import InstanceName
from broker.domain.offer import Offer
from providers.simulated.config import SimulatedConfig
from providers.simulated.market import rng


class Lifetimes:
    """Lifetimes by machine name. A file stores the names with scripted lifetimes, so each lifetime is used once."""

    def __init__(self, config: SimulatedConfig, state: Path) -> None:
        self._config = config
        self._file = state / "scripted-lifetimes"

    def of(self, name: InstanceName, offer: Offer) -> float | None:
        """Return the lifetime in seconds, always the same for a name; None: never preempted."""
        if not offer.spot:
            return None
        if self._config.lifetimes_s and (place := self._position(name)) < len(self._config.lifetimes_s):
            return self._config.lifetimes_s[place]
        if not offer.preemptions_per_hour:
            return None
        return rng(self._config.seed, "lifetime", name).expovariate(offer.preemptions_per_hour / 3600)

    def _position(self, name: InstanceName) -> int:
        """Return the position among all spot machines ever bought; 0 for the first."""
        names = self._file.read_text().split() if self._file.exists() else []
        if name in names:
            return names.index(name)
        if len(names) < len(self._config.lifetimes_s):
            fresh = self._file.with_suffix(".new")
            fresh.write_text("\n".join([*names, name]))
            os.replace(fresh, self._file)
        return len(names)
