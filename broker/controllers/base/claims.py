"""Leases on the attempts of one lane, and what becomes of those that a lost answer leaves behind."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

from broker.controllers.base.context import ControllerContext
from broker.domain.errors import StoreUnavailable
from broker.ports import Lane, Leased


class Claims:
    """Of one controller, which works on its claims one after the other.

    A claim whose answer is lost may have leased rows that nobody would look at until the leases lapse, and a write that
    fails leaves leases behind. They are ended before the next claim, for whoever comes first, also where a signal has
    moved them to another lane.
    """

    def __init__(self, context: ControllerContext, lane: Lane) -> None:
        self._context = context
        self._lane = lane
        self._owner = f"{context.owner}/{lane.value}"
        self._unsure = False

    @asynccontextmanager
    async def leased(self, *, limit: int, turns: Mapping[str, float]) -> AsyncIterator[Sequence[Leased]]:
        """`turns`: as `Store.claim_attempts` takes it. Raises StoreUnavailable."""
        store, lease_s = self._context.store, self._context.rhythm.lease_s
        if self._unsure:
            await store.end_leases(owner=self._owner)
        self._unsure = False
        with self.writing():
            yield await store.claim_attempts(self._lane, owner=self._owner, lease_s=lease_s, limit=limit, turns=turns)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Of one row, where others go on though its write has no answer."""
        try:
            yield
        except StoreUnavailable:
            self._unsure = True
            raise
