"""The store's answer to what was spent."""

from typing import Protocol

from broker.domain.spending import Paid, SpendWindow


class SpendingStore(Protocol):
    async def paid(self, window: SpendWindow) -> Paid:
        """Every charge and adjustment that was written in the window, by attempt, category and local day."""
        ...
