"""Observations of spot markets over a window of time: listed offers, refused creates and own machines.

Read by `broker.estimator.spot_timelines`, which derives when each market had capacity.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from broker.domain.market.offer_history import MarketGroup, RecordedHistory


class OwnSpotRun(NamedTuple):
    """Machines of one attempt on spot."""

    group: MarketGroup
    nodes: int
    since_s: float
    """Seconds since the epoch at which the machines began to run."""
    until_s: float
    """Seconds since the epoch at which the machines ended; the present time if they still run."""
    is_preempted: bool

    @property
    def span_min(self) -> tuple[float, float]:
        """Return start and end in minutes. If clocks disagree, the end equals the start."""
        begin = self.since_s / 60
        return begin, max(begin, self.until_s / 60)


@dataclass(frozen=True, kw_only=True)
class SpotEvidence:
    """All observations of spot markets in a window, of all teams and brokers."""

    recorded: RecordedHistory = field(default_factory=RecordedHistory)
    runs: Sequence[OwnSpotRun] = ()
