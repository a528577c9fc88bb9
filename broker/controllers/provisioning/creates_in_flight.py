"""Creates that can still happen: those of this process in flight, and those of launchers not proven dead."""

import asyncio
import logging
from collections.abc import Set

from broker.controllers.base.context import ControllerContext
from broker.domain.ids import AttemptId, InstanceName
from broker.domain.instance import Liveness
from broker.domain.job import Attempt, AttemptState

log = logging.getLogger(__name__)

ASK_LIMIT_S = 5.0
"""Timeout of a request to cancel a launch, in seconds."""
CANCEL_REPEAT_S = 10.0
"""Seconds between two such requests for one attempt."""


class CreatesInFlight:
    """Creates of one process. Shared by launch and termination."""

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._in_flight: dict[InstanceName, asyncio.Task[None] | None] = {}
        self._dead_since: dict[tuple[AttemptId, str, bool], float] = {}
        self._asked: dict[AttemptId, float] = {}

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def register(self, attempt: Attempt) -> None:
        """Register a create before it is committed. Call `attach` once it is, otherwise `release`.

        The proof that the launcher of an earlier create is dead is discarded, even if the launcher is the same.
        """
        self._in_flight[attempt.name] = None
        self._dead_since = {key: at for key, at in self._dead_since.items() if key[0] != attempt.id}

    def attach(self, name: InstanceName, call: asyncio.Task[None]) -> None:
        """Keep a create in flight until `call` has ended, with any outcome."""
        self._in_flight[name] = call
        call.add_done_callback(lambda _: self.release(name))

    def release(self, name: InstanceName) -> None:
        """Remove a create that has ended or was never sent."""
        self._in_flight.pop(name, None)

    def is_in_flight(self, name: InstanceName) -> bool:
        """Return True while this process may still receive the answer of a create."""
        return name in self._in_flight

    async def stop(self, attempt: Attempt) -> None:
        """Cancel our own call, which frees its slot, and ask the launcher to stop."""
        call = self._in_flight.get(attempt.name)
        if call is not None and not call.cancelling():
            call.cancel()
        await self.ask(attempt)

    async def ask(self, attempt: Attempt) -> None:
        """Ask the launcher to cancel a launch, at most every `CANCEL_REPEAT_S` seconds. Never raises."""
        now = self._context.clock.monotonic()
        if now - self._asked.get(attempt.id, float("-inf")) < CANCEL_REPEAT_S:
            return
        self._asked[attempt.id] = now
        provider = self._context.provider_of(attempt)
        try:
            async with asyncio.timeout(ASK_LIMIT_S):
                await provider.cancel(attempt.name)
        except Exception as e:
            log.warning("%s: cancelling the launch of %s: %s: %s", provider.name, attempt.name, type(e).__name__, e)

    async def dead_since(self, attempt: Attempt) -> float | None:
        """Return the monotonic time at which this process first knew that nothing creates the name; None: unknown."""
        if attempt.name in self._in_flight:
            return None
        # An empty `launched_by` means: while launching, no create was sent; in later states, a create has answered.
        key = (attempt.id, attempt.launched_by, attempt.state is AttemptState.LAUNCHING)
        dead_since = self._dead_since.get(key)
        if dead_since is not None:
            return dead_since
        provider = self._context.provider_of(attempt)
        is_finished = not attempt.launched_by
        if not is_finished and await provider.launcher(attempt.launched_by, attempt.name) is not Liveness.DEAD:
            return None
        if attempt.name in self._in_flight:  # another create began during the request
            return None
        return self._dead_since.setdefault(key, self._context.clock.monotonic())

    def keep(self, live: Set[AttemptId]) -> None:
        """Forget attempts that are not live."""
        self._dead_since = {key: at for key, at in self._dead_since.items() if key[0] in live}
        self._asked = {attempt: at for attempt, at in self._asked.items() if attempt in live}
