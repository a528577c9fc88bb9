"""Runs controllers until told to stop: level-triggered, one at a time each, and ended by one error only."""

import asyncio
import logging
from typing import Protocol

from broker.domain.errors import GpubrokerError, SchemaNewer
from broker.ports import Clock

log = logging.getLogger(__name__)

MAX_BACK_OFF_S = 10.0


class Controller(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def every_s(self) -> float:
        """Seconds between two steps that found nothing to do."""
        ...

    async def step(self) -> bool:
        """One round; True when there may be more to do at once."""
        ...


async def run_forever(controller: Controller, clock: Clock) -> None:
    """Steps until cancelled. Expected errors (a cloud, the database, the blobs) back off; others are logged whole.

    Raises SchemaNewer alone: nothing may go on here then.
    """
    failures = 0
    while True:
        try:
            busy = await controller.step()
            failures = 0
        except (asyncio.CancelledError, SchemaNewer):
            raise
        except GpubrokerError as e:
            failures += 1
            busy = False
            log.warning("%s: %s: %s", controller.name, type(e).__name__, e)
        except Exception:
            failures += 1
            busy = False
            log.exception("%s failed", controller.name)
        pause = 0.0 if busy else controller.every_s
        if failures:
            pause = min(MAX_BACK_OFF_S, max(controller.every_s, 0.1) * 2.0 ** min(failures - 1, 10))
        await clock.sleep(pause)
