"""Time, injected."""

from datetime import datetime
from typing import Protocol


class Clock(Protocol):
    """Time, injected: wall time for records, monotonic time for patience. The daemon's wall time is its database's."""

    def now(self) -> datetime: ...
    def monotonic(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...
