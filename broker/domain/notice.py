"""What people are told that is about no single job: a budget's threshold, a digest, a channel that was disabled."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Goes through the same outbox as a job's events, to the channels of its team and the installation's."""

    id: str
    """Chosen by whoever posts it: what must be told once has one id, e.g. `digest-daily-2026-03-01-nlp`."""
    kind: str
    """Dotted, e.g. `budget.threshold`."""
    message: str
    """One line for people."""
    team: str | None = None
    """None: the installation's, for its own channels only."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """JSON."""
    at: datetime | None = None
    """The database's time, once posted."""
