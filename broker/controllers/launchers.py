"""Which creates can still happen: ours in flight, and those of launchers that are not proven dead."""

from collections.abc import Set

from broker.controllers.context import Context
from broker.domain.ids import AttemptId, InstanceName
from broker.domain.instance import Liveness
from broker.domain.job import Attempt


class Launchers:
    """Shared by launch and termination of one process."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._in_flight: set[InstanceName] = set()
        self._dead_since: dict[tuple[AttemptId, str], float] = {}

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def begin(self, name: InstanceName) -> None:
        """Before the create is committed; `end` when the call has returned, whatever it said."""
        self._in_flight.add(name)

    def end(self, name: InstanceName) -> None:
        self._in_flight.discard(name)

    async def dead_since(self, attempt: Attempt) -> float | None:
        """Monotonic time at which we first knew that nothing can create the name any more; None: not known."""
        if attempt.name in self._in_flight:
            return None
        key = (attempt.id, attempt.launched_by)
        known = self._dead_since.get(key)
        if known is not None:
            return known
        provider = self._context.provider_of(attempt)
        if await provider.launcher(attempt.launched_by, attempt.name) is not Liveness.DEAD:
            return None
        return self._dead_since.setdefault(key, self._context.clock.monotonic())

    def keep(self, live: Set[AttemptId]) -> None:
        """Forgets all others."""
        self._dead_since = {key: at for key, at in self._dead_since.items() if key[0] in live}
