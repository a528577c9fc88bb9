"""Outcomes of the controllers' claims of jobs and attempts, which `/readyz` reports.

Without claims the API still accepts jobs, but nothing buys, watches or ends a machine.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SLOW_S = 3.0
"""Seconds after which a claim without an answer counts as failing; the database may answer it later."""
STALLED_S = 90.0
"""Seconds without a claim after which a controller counts as stuck; a step ends or times out before."""


class ClaimWatch:
    """Latest claim of each controller of this process: when it began, when it ended, and its error."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._began: dict[str, float] = {}
        """Start of the claims that have no answer yet, by controller."""
        self._ended: dict[str, float] = {}
        self._errors: dict[str, str] = {}

    @contextmanager
    def claiming(self, controller: str) -> Iterator[None]:
        """Observe one claim. Errors of the block are recorded and raised."""
        self._began[controller] = self._monotonic()
        try:
            yield
        except Exception as error:
            self._errors[controller] = (str(error) or type(error).__name__).partition("\n")[0]
            raise
        else:
            self._errors.pop(controller, None)
        finally:
            self._ended[controller] = self._monotonic()
            self._began.pop(controller, None)

    def fault(self) -> str:
        """Return why claims fail, in one line; empty: each controller claims."""
        now = self._monotonic()
        for controller, error in self._errors.items():
            return f"claims failing: {controller}: {error}"
        for controller, began in self._began.items():
            if now - began > SLOW_S:
                return f"claims failing: {controller}: the database has not answered a claim for {now - began:.0f} s"
        for controller, ended in self._ended.items():
            if controller not in self._began and now - ended > STALLED_S:
                return f"claims failing: {controller} has claimed nothing for {now - ended:.0f} s; see the daemon's log"
        return ""
