"""Destroy calls in flight.

The decision to destroy a machine is final, and no name is used twice, so a call needs no lease of a row. A call keeps
its place in its cloud's queue however often any broker polls the row.
"""

import asyncio
from collections.abc import Set
from dataclasses import dataclass

from broker.controllers.base.context import ControllerContext
from broker.domain.errors import OutcomeUnknown, ProviderError
from broker.domain.ids import AttemptId, InstanceName, attempt_of
from broker.domain.job import Handle
from broker.runtime.background_tasks import Tasks

WAIT_S = 1.0
"""Seconds for which a poll waits for an answer. A later answer is returned to the next poll."""
LIMIT_S = 300.0
"""Timeout of one call in seconds, including the wait in its cloud's queue."""


@dataclass
class _Call:
    name: InstanceName
    task: asyncio.Task[None] | None = None
    error: ProviderError | None = None
    """Error of the call; None: the cloud has accepted it."""


class Destroys:
    """Destroys machines, one call at a time for each. Shared by termination and sweep of one process."""

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._tasks = Tasks()
        self._calls: dict[tuple[str, str], _Call] = {}

    async def ask(self, provider: str, handle: Handle) -> bool:
        """Return True if the cloud has accepted the destroy, False if it has not answered yet.

        Raises Gone when the machine does not exist, ProviderError when the cloud has not accepted the destroy.
        """
        key = (provider, handle.id)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _Call(name=handle.name)
            call.task = self._tasks.start(self._destroy(provider, handle, call))
        assert call.task is not None
        await asyncio.wait([call.task], timeout=WAIT_S)
        if not call.task.done():
            return False
        self._calls.pop(key, None)
        if call.error is not None:
            raise call.error
        return True

    async def _destroy(self, provider: str, handle: Handle, call: _Call) -> None:
        call.error = OutcomeUnknown("the call was cancelled; see the daemon's log")
        try:
            async with asyncio.timeout(LIMIT_S):
                await self._context.providers[provider].destroy(handle)
        except ProviderError as e:
            call.error = e
        except TimeoutError:
            call.error = OutcomeUnknown(f"no answer within {LIMIT_S:g} s")
        else:
            call.error = None

    def keep(self, live: Set[AttemptId]) -> None:
        """Forget unread answers about attempts that are not live."""
        installation = self._context.installation
        self._calls = {
            key: call
            for key, call in self._calls.items()
            if attempt_of(installation, call.name) in live or call.task is None or not call.task.done()
        }

    async def close(self) -> None:
        """Cancel the calls in flight. The next process polls their rows again."""
        await self._tasks.cancel()
