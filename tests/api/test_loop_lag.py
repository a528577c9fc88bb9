"""The event loop's lag on /metrics."""

import asyncio
import time

from broker.api.core.loop_lag import WINDOW_S, LoopLag
from broker.runtime.clock import SystemClock
from tests.api.harness import memory_blobs, serving
from tests.support.memory_store.store import MemoryStore

METRIC = "gpubroker_event_loop_lag_seconds "


def test_the_largest_lag_of_the_window_is_kept() -> None:
    now = [0.0]
    lag = LoopLag(lambda: now[0])
    assert lag.largest_s() == 0.0
    for at, lag_s in ((1.0, 0.2), (2.0, 0.9), (3.0, 0.1), (4.0, 0.3)):
        now[0] = at
        lag.record(lag_s)
    assert lag.largest_s() == 0.9
    now[0] = 2.5 + WINDOW_S
    assert lag.largest_s() == 0.3
    now[0] = 5.0 + WINDOW_S
    assert lag.largest_s() == 0.0


async def test_a_stall_of_the_loop_is_on_metrics() -> None:
    async with serving(MemoryStore(SystemClock()), memory_blobs()) as api:
        headers = await api.token("ada", "metrics")
        await asyncio.sleep(0)  # the measuring task has started
        time.sleep(0.5)  # noqa: ASYNC251 - the stall
        async with api.http.get(f"{api.url}/metrics", headers=headers) as answer:
            line = next(line for line in (await answer.text()).splitlines() if line.startswith(METRIC))
        assert float(line.removeprefix(METRIC)) > 0.3
