"""Rows are decided side by side: a broken or slow one is left out, and only a fault of all is an error."""

import asyncio
from typing import cast

import pytest

from broker.controllers.base.batch import decide_batch
from broker.controllers.base.context import ControllerContext, Intervals
from broker.domain.errors import StoreUnavailable
from broker.ports import Blobs, Store
from tests.support import build
from tests.unit.providers.clocks import SteppedClock


def context(lease_s: float = 30.0) -> ControllerContext:
    return ControllerContext(
        installation=build.INSTALLATION, owner="test", store=cast(Store, None), blobs=cast(Blobs, None),
        providers={}, clock=SteppedClock(), intervals=Intervals(lease_s=lease_s),
    )  # fmt: skip


async def test_a_broken_row_keeps_no_other_from_its_answer() -> None:
    async def decide(row: int) -> float:
        return 1 / row

    assert await decide_batch(context(), "test", [1, 0, 2], decide) == [(1, 1.0), (2, 0.5)]


async def test_hanging_row_is_skipped_before_other_leases_lapse() -> None:

    async def decide(row: int) -> int:
        if row == 1:
            await asyncio.Event().wait()
        return row

    assert await decide_batch(context(lease_s=0.1), "test", [0, 1, 2], decide) == [(0, 0), (2, 2)]


async def test_an_error_of_every_row_is_raised_to_the_caller() -> None:
    async def decide(row: int) -> int:
        raise StoreUnavailable("down")

    with pytest.raises(StoreUnavailable):
        await decide_batch(context(), "test", [1, 2], decide)
    assert await decide_batch(context(), "test", [], decide) == []
