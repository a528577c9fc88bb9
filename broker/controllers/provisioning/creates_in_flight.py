"""Which creates can still happen: ours in flight, and those of launchers that are not proven dead."""

import asyncio
import logging
from collections.abc import Set

from broker.controllers.base.context import ControllerContext
from broker.domain.ids import AttemptId, InstanceName
from broker.domain.instance import Liveness
from broker.domain.job import Attempt, AttemptState

log = logging.getLogger(__name__)

ASK_LIMIT_S = 5.0
"""How long a cloud may take to hear that a launch is not wanted any more."""
ASK_AGAIN_S = 10.0


class CreatesInFlight:
    """Shared by launch and termination of one process."""

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._in_flight: dict[InstanceName, asyncio.Task[None] | None] = {}
        self._dead_since: dict[tuple[AttemptId, str, bool], float] = {}
        self._asked: dict[AttemptId, float] = {}

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def register(self, attempt: Attempt) -> None:
        """Before the create is committed; `end` when it was not, else `carry` the call that sends it. What was known of
        an earlier create's launcher says nothing of this one's, also where it is the same.
        """
        self._in_flight[attempt.name] = None
        self._dead_since = {key: at for key, at in self._dead_since.items() if key[0] != attempt.id}

    def attach(self, name: InstanceName, call: asyncio.Task[None]) -> None:
        """In flight until `call` has ended, whatever it said."""
        self._in_flight[name] = call
        call.add_done_callback(lambda _: self.release(name))

    def release(self, name: InstanceName) -> None:
        self._in_flight.pop(name, None)

    def is_in_flight(self, name: InstanceName) -> bool:
        """True while an answer of create may still come to this process."""
        return name in self._in_flight

    async def stop(self, attempt: Attempt) -> None:
        """Ends our own call, which then holds no slot, and asks whatever carries it out to stop."""
        call = self._in_flight.get(attempt.name)
        if call is not None and not call.cancelling():
            call.cancel()
        await self.ask(attempt)

    async def ask(self, attempt: Attempt) -> None:
        """Tells the launcher that the name is not wanted any more; again only after a while. Never raises."""
        now = self._context.clock.monotonic()
        if now - self._asked.get(attempt.id, float("-inf")) < ASK_AGAIN_S:
            return
        self._asked[attempt.id] = now
        provider = self._context.provider_of(attempt)
        try:
            async with asyncio.timeout(ASK_LIMIT_S):
                await provider.cancel(attempt.name)
        except Exception as e:
            log.warning("%s: cancelling the launch of %s: %s: %s", provider.name, attempt.name, type(e).__name__, e)

    async def dead_since(self, attempt: Attempt) -> float | None:
        """Monotonic time at which we first knew that nothing can create the name any more; None: not known."""
        if attempt.name in self._in_flight:
            return None
        # Without a launcher: while launching, nothing was sent; later, another broker's create may have answered since.
        key = (attempt.id, attempt.launched_by, attempt.state is AttemptState.LAUNCHING)
        known = self._dead_since.get(key)
        if known is not None:
            return known
        provider = self._context.provider_of(attempt)
        through = not attempt.launched_by
        if not through and await provider.launcher(attempt.launched_by, attempt.name) is not Liveness.DEAD:
            return None
        if attempt.name in self._in_flight:  # begun while the launcher of the one before was asked for
            return None
        return self._dead_since.setdefault(key, self._context.clock.monotonic())

    def keep(self, live: Set[AttemptId]) -> None:
        """Forgets all others."""
        self._dead_since = {key: at for key, at in self._dead_since.items() if key[0] in live}
        self._asked = {attempt: at for attempt, at in self._asked.items() if attempt in live}
