"""Interval between saves, corrected by the measured cost of saves."""

import contextlib
from collections import deque
from collections.abc import Callable
from statistics import mean

from trainer.contract import save_interval
from trainer.contract.train import CheckpointConfig
from trainer.core.ipc import RunFolder, replace

LATEST = 3
"""Number of saves whose mean cost counts."""
REPORT_FACTOR = 1.5
"""Factor of change after which the interval is reported again."""


class SaveInterval:
    """Save interval of one attempt."""

    def __init__(
        self, run: RunFolder, *, config: CheckpointConfig, losses_per_hour: float, report: Callable[[str, str], None]
    ) -> None:
        self._run, self._config, self._losses, self._report = run, config, losses_per_hour, report
        self._costs: deque[float] = deque(maxlen=LATEST)
        self._reported_s = 0.0
        self.every_s = config.max_loss_s
        """Seconds until the next save."""

    def saved(self, cost_s: float) -> None:
        """Record a commit, `cost_s` seconds after its snapshot began."""
        self._costs.append(cost_s)
        cost_s = mean(self._costs)
        self.every_s = save_interval.interval_s(cost_s, self._losses, self._config.max_loss_s)
        with contextlib.suppress(OSError):  # full disk: the worker keeps the previous interval
            replace(self._run.interval, f"{self.every_s:.3f}")
        if not self._reported_s / REPORT_FACTOR <= self.every_s <= self._reported_s * REPORT_FACTOR:
            self._reported_s = self.every_s
            self._report("interval", save_interval.interval_message(cost_s, self._losses, self._config))
