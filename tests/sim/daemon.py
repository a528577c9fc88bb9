"""Broker's process: the daemon's controllers, and the errors that count as bugs of gpubroker."""

import asyncio
import logging
from collections.abc import Callable

from broker.controllers.fleet import Fleet
from broker.controllers.market.poller import MarketPoller
from broker.domain.errors import GpubrokerError, StoreUnavailable
from broker.runtime.clock import DatabaseClock
from broker.runtime.control_loop import run_forever


async def daemon(clock: DatabaseClock, market: MarketPoller, fleet: Fleet) -> None:
    """Start the daemon repeatedly until it runs."""
    started = False
    while not started:
        try:
            await clock.start()
            started = True
        except StoreUnavailable:
            await clock.sleep(1.0)
    async with asyncio.TaskGroup() as group:
        group.create_task(run_forever(clock, clock))
        group.create_task(run_forever(market, clock))
        group.create_task(fleet.run())


class Errors(logging.Handler):
    """Handler that collects errors which no fault explains."""

    def __init__(self, fail: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._fail = fail

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, GpubrokerError | TimeoutError):
            self._fail("no_internal_error", f"{record.getMessage()}: {type(error).__name__}: {error}")
