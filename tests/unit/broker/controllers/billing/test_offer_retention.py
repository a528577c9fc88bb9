"""Retention of the offer history: whole days older than 90 days are deleted, by a clock that is trusted."""

from datetime import timedelta

import pytest

from broker.controllers.base.context import ControllerContext
from broker.controllers.billing.retention import RetentionController
from broker.domain.market.offer_history import (
    DAY_BUCKETS,
    KEEP_DAYS,
    BucketFigures,
    HistoryQuery,
    MarketGroup,
    OfferSample,
    bucket_of,
)
from broker.domain.tenancy import Tenant
from tests.api.harness import memory_blobs
from tests.support import build
from tests.support.memory_store.store import MemoryStore
from tests.unit.providers.clocks import SteppedClock

H100 = MarketGroup("vast", "vast", "SE", "h100", 8, True)
AGES = (2, KEEP_DAYS - 1, KEEP_DAYS + 2)
"""Days before now of the recorded buckets."""


@pytest.mark.parametrize("is_right", [True, False])
async def test_old_days_are_deleted_unless_the_clock_is_wrong(is_right: bool) -> None:
    clock = SteppedClock()
    store = MemoryStore(clock)

    async def is_clock_right() -> bool:
        return is_right

    context = ControllerContext(
        installation=build.INSTALLATION, owner="test", store=store, blobs=memory_blobs(), providers={}, clock=clock,
        is_clock_right=is_clock_right,
    )  # fmt: skip
    now = bucket_of(clock.now())
    for days in AGES:
        figures = {H100: BucketFigures(1, 1, 100)}
        bucket = now - days * DAY_BUCKETS
        await store.record_offers([OfferSample(provider="vast", bucket=bucket, figures=figures)])
        await store.record_refusal(H100, bucket)
    await RetentionController(context).step()
    query = HistoryQuery(accelerators=["h100"], since=clock.now() - timedelta(days=365), until=clock.now())
    recorded = await store.as_tenant(Tenant(team="default", owner="ann", token_id="t")).offer_history(query)
    kept = {now - days * DAY_BUCKETS for days in AGES if days < KEEP_DAYS or not is_right}
    assert {run.start for run in recorded.runs[H100]} == kept
    assert set(recorded.refused[H100]) == kept
