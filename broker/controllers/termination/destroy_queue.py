"""Destroys under way. What is to be destroyed stays so, and no name is used twice: a call needs no lease of a row, and
keeps its place in its cloud's queue however often, and by whomever, that row is looked at meanwhile.
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
"""How long a look waits for an answer; else the next one hears it."""
LIMIT_S = 300.0
"""Of one call, with the wait for its turn: a cloud's queue is that long at most."""


@dataclass
class _Call:
    name: InstanceName
    task: asyncio.Task[None] | None = None
    error: ProviderError | None = None
    """What it has ended with; None: the cloud has taken it."""


class Destroys:
    """Shared by termination and sweep of one process; one call at a time for each machine."""

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._tasks = Tasks()
        self._calls: dict[tuple[str, str], _Call] = {}

    async def ask(self, provider: str, handle: Handle) -> bool:
        """True: the cloud has taken it; False: it has not answered yet, so ask again.

        Raises Gone: nothing is there; ProviderError: it has not taken it.
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
        call.error = OutcomeUnknown("the call was broken off; see the daemon's log")
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
        """Forgets the answers about all others that nobody has asked for."""
        ours = self._context.installation
        self._calls = {
            key: call
            for key, call in self._calls.items()
            if attempt_of(ours, call.name) in live or call.task is None or not call.task.done()
        }

    async def close(self) -> None:
        """Ends the calls under way: their rows are looked at again by the next process."""
        await self._tasks.cancel()
