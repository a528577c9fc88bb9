"""For how long beats can be read: what nobody saw in that time says nothing against a machine."""

from collections.abc import Sequence
from typing import cast

import pytest

from broker.controllers.beats import Beats
from broker.controllers.context import Context
from broker.domain.errors import BlobsUnavailable
from broker.ports import BlobInfo, Blobs, Store
from tests.unit.decide import build
from tests.unit.providers.clocks import SteppedClock

LOOK_S = 2.0


class Flaky:
    """A blob store without any beat."""

    away = False

    async def list(self, prefix: str) -> Sequence[BlobInfo]:
        if self.away:
            raise BlobsUnavailable("503")
        return []


class Watched:
    def __init__(self) -> None:
        self.store, self.clock = Flaky(), SteppedClock()
        context = Context(
            installation=build.INSTALLATION, owner="test", store=cast(Store, None), blobs=cast(Blobs, self.store),
            providers={}, clock=self.clock,
        )  # fmt: skip
        self.beats = Beats(context)

    async def looks(self, *away: bool) -> float | None:
        for one in away:
            self.clock.advance(LOOK_S)
            self.store.away = one
            try:
                await self.beats.refresh()
            except BlobsUnavailable:
                continue
        return self.beats.readable_s


async def test_a_store_that_fails_some_calls_can_be_read_in_between() -> None:
    """Else no boot deadline would ever come."""
    watched = Watched()
    assert await watched.looks(False) == 0
    assert await watched.looks(*[True, False] * 10) == 20 * LOOK_S
    assert await watched.looks(True) is None


@pytest.mark.parametrize("looked", [True, False])
async def test_after_an_outage_it_begins_anew_whether_anybody_looked_or_not(looked: bool) -> None:
    watched = Watched()
    await watched.looks(*[False] * 10)
    if looked:
        assert await watched.looks(*[True] * 1800) is None
    else:
        watched.clock.advance(3600)
    assert await watched.looks(False) == 0
    assert await watched.looks(False) == LOOK_S
