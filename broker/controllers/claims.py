"""Leases on the attempts of one lane, and what becomes of those that a lost answer leaves behind."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from broker.controllers.context import Context
from broker.domain.errors import StoreUnavailable
from broker.ports import Lane, Leased


class Claims:
    """Of one controller, which works on its claims one after the other.

    A claim whose answer is lost may have leased rows that nobody would look at until the leases lapse, and a write that
    fails leaves leases behind. They are ended before the next claim, for whoever comes first.
    """

    def __init__(self, context: Context, lane: Lane) -> None:
        self._context = context
        self._lane = lane
        self._unsure = False

    @asynccontextmanager
    async def leased(self, *, limit: int, turns: Mapping[str, float]) -> AsyncIterator[Sequence[Leased]]:
        """`turns`: as `Store.claim_attempts` takes it. Raises StoreUnavailable."""
        store, owner = self._context.store, self._context.owner
        if self._unsure:
            await store.release_all(self._lane, owner=owner)
        self._unsure = False
        try:
            yield await store.claim_attempts(
                self._lane, owner=owner, lease_s=self._context.rhythm.lease_s, limit=limit, turns=turns
            )
        except StoreUnavailable:
            self._unsure = True
            raise
