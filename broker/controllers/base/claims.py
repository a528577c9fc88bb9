"""Leases on the attempts of one lane, and the release of leases that a lost answer left behind."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

from broker.controllers.base.context import ControllerContext
from broker.domain.errors import StoreUnavailable
from broker.ports import Lane, Leased


class Claims:
    """Claims of one controller, which works on one claim at a time.

    A claim whose answer is lost may have leased rows, and a failed write leaves leases behind. These leases are ended
    before the next claim. Any broker can then take the rows, even if a signal has moved the rows to another lane.
    """

    def __init__(self, context: ControllerContext, lane: Lane) -> None:
        self._context = context
        self._lane = lane
        self._owner = f"{context.owner}/{lane.value}"
        self._unsure = False

    @asynccontextmanager
    async def leased(self, *, limit: int, turns: Mapping[str, float]) -> AsyncIterator[Sequence[Leased]]:
        """Claim attempts for the duration of the block. Raises StoreUnavailable.

        `turns`: see `Store.claim_attempts`.
        """
        store, lease_s = self._context.store, self._context.intervals.lease_s
        with self._context.claim_watch.claiming(self._lane.value), self.writing():
            if self._unsure:
                await store.end_leases(owner=self._owner)
            self._unsure = False
            claimed = await store.claim_attempts(
                self._lane, owner=self._owner, lease_s=lease_s, limit=limit, turns=turns
            )
        with self.writing():
            yield claimed

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Guard the write of one row: if it has no answer, the leases are ended before the next claim."""
        try:
            yield
        except StoreUnavailable:
            self._unsure = True
            raise
