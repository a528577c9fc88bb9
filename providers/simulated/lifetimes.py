"""How long a simulated spot machine lives: by script, then by its offer's hazard."""

import os
from pathlib import Path

from broker.domain.ids import InstanceName
from broker.domain.offer import Offer
from providers.simulated.config import SimulatedConfig
from providers.simulated.seeded_random import rng


class Lifetimes:
    """The scripted ones are handed out once each, also across restarts: which names had them is kept in a file."""

    def __init__(self, config: SimulatedConfig, state: Path) -> None:
        self._config = config
        self._file = state / "scripted-lifetimes"

    def of(self, name: InstanceName, offer: Offer) -> float | None:
        """Seconds; None: never preempted. The same for the same name."""
        if not offer.spot:
            return None
        if self._config.lifetimes_s and (place := self._place(name)) < len(self._config.lifetimes_s):
            return self._config.lifetimes_s[place]
        if not offer.preemptions_per_hour:
            return None
        return rng(self._config.seed, "lifetime", name).expovariate(offer.preemptions_per_hour / 3600)

    def _place(self, name: InstanceName) -> int:
        """0 for the first spot machine that was ever bought here."""
        names = self._file.read_text().split() if self._file.exists() else []
        if name in names:
            return names.index(name)
        if len(names) < len(self._config.lifetimes_s):
            fresh = self._file.with_suffix(".new")
            fresh.write_text("\n".join([*names, name]))
            os.replace(fresh, self._file)
        return len(names)
