"""The rig of the webhooks' tests."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from broker.notify.webhook.notifier import WebhookNotifier
from tests.conformance.samples import ManualClock
from tests.unit.broker.notify.harness import BOX, Rig


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """Yield a rig whose notifier may reach 127.0.0.1 by plain HTTP."""
    clock = ManualClock()
    async with AsyncExitStack() as stack:

        def make(**settings: Any) -> WebhookNotifier:
            notifier = WebhookNotifier(BOX, clock, **settings)
            stack.push_async_callback(notifier.close)
            return notifier

        yield Rig(clock=clock, make=make, notifier=make(insecure_hosts=["127.0.0.1"], total_s=300.0))
