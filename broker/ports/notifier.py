"""The door to people."""

from typing import Protocol

from broker.domain.job import Event


class Notifier(Protocol):
    """Tells people. Delivery is at least once; `(job_id, seq)` tells repeats apart."""

    async def notify(self, event: Event) -> None:
        """Raises any exception when it was not delivered; it is tried again later."""
        ...
