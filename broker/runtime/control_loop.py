"""Loop that runs a controller until it is cancelled: level-triggered, one step at a time."""

import asyncio
import logging
from typing import Protocol

from broker.domain.errors import GpubrokerError, SchemaNewer
from broker.ports import Clock

log = logging.getLogger(__name__)

MAX_BACK_OFF_S = 10.0
"""Longest pause in seconds after failed steps."""


class Controller(Protocol):
    """Interface of a controller."""

    @property
    def name(self) -> str: ...
    @property
    def every_s(self) -> float:
        """Seconds to wait after a step that had nothing to do."""
        ...

    async def step(self) -> bool:
        """Run one step; return True if more work may be due at once."""
        ...


def _is_cancelled() -> bool:
    """Return whether this task is to end. A task that awaits a cancelled future gets the same error."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def run_forever(controller: Controller, clock: Clock) -> None:
    """Run steps until cancelled. After an error the loop backs off; unexpected errors are logged with a traceback.

    Raises SchemaNewer only, because this broker must not write to a newer schema.
    """
    failures = 0
    while True:
        try:
            busy = await controller.step()
            failures = 0
        except SchemaNewer:
            raise
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            failures += 1
            busy = False
            log.exception("%s: what it waited for was cancelled", controller.name)
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
