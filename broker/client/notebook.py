"""Live progress of `fit` in a notebook: bar, plots and latest events in one output that is redrawn in place.

IPython is no dependency. A notebook's kernel has imported IPython before any cell runs.
"""

import importlib
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from broker.api.schemas.jobs import EventView, JobDetail
from broker.api.schemas.metrics import MetricsView
from broker.reporting.notebook_html import text_html

SHOWN_EVENTS = 5
"""Number of latest events below the plots."""


@runtime_checkable
class LiveProgress(Protocol):
    """A display that also gets snapshots of the job while it runs."""

    def __call__(self, event: EventView, /) -> None: ...
    def snapshot(self, job: JobDetail, series: MetricsView | None, /) -> None:
        """Show the job, and its steps if they could be read."""
        ...


def kernel_display() -> Callable[..., Any] | None:
    """Return IPython's `display` in the kernel of a notebook; None in scripts and terminals."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    if get_shell is None or getattr(get_shell(), "kernel", None) is None:
        return None
    display: Callable[..., Any] = importlib.import_module("IPython.display").display
    return display


class NotebookPanel:
    """One output of a cell, redrawn at each event and snapshot."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        self._handle: Any = None
        self._events: deque[EventView] = deque(maxlen=SHOWN_EVENTS)
        self._job: JobDetail | None = None
        self._series: MetricsView | None = None

    def __call__(self, event: EventView) -> None:
        self._events.append(event)
        self._draw()

    def snapshot(self, job: JobDetail, series: MetricsView | None) -> None:
        """Show the job; without `series` the previous plots stay."""
        self._job, self._series = job, series or self._series
        self._draw()

    def _draw(self) -> None:
        if self._handle is None:
            self._handle = self._display(self, display_id=True)
        else:
            self._handle.update(self)

    def _repr_html_(self) -> str:
        parts = [view._repr_html_() for view in (self._job, self._series) if view is not None]
        lines = "\n".join(text_html(line) for line in self._lines())
        return "".join([*parts, f"<pre>{lines}</pre>"])

    def __repr__(self) -> str:
        return "\n".join(ascii(line)[1:-1] for line in self._lines())

    def _lines(self) -> list[str]:
        return [f"{event.at:%H:%M:%S} {event.kind}: {event.message}" for event in self._events if event.at is not None]
