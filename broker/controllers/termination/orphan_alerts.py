"""Notices about orphans that keep billing, because a log would be read too late."""

import hashlib
from collections import Counter
from collections.abc import Set

from broker.controllers.base.context import ControllerContext
from broker.domain.job import Handle
from broker.domain.notifications import Notice
from broker.lifecycle.decisions.termination_decision import is_reported


class OrphanNews:
    """Posts notices. Ids follow from the machine and the number of refusals, so several brokers post one notice."""

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._refused: Counter[str] = Counter()
        self._spared: set[str] = set()

    async def spared(self, key: str, handle: Handle, why: str) -> None:
        """Report once that an orphan is not destroyed. Raises StoreError."""
        if key not in self._spared:
            await self._post(key, handle, "orphan.spared", f"{_named(handle)} exists and bills: {why}", "spared")
            self._spared.add(key)

    async def refused(self, key: str, handle: Handle, why: str) -> None:
        """Report that a destroy failed, after `destroy_alert` failures and at each doubling. Raises StoreError."""
        self._refused[key] += 1
        times = self._refused[key]
        if is_reported(times, self._context.intervals.destroy_alert):
            message = (
                f"{_named(handle)} cannot be destroyed and bills on ({times} times): {why}; "
                "end it in the cloud's console"
            )
            await self._post(key, handle, "orphan.destroy_failed", message, str(times))

    def keep(self, cloud: str, orphans: Set[str]) -> None:
        """Forget the machines of one cloud that are not orphans any more.

        `cloud`: prefix of their keys. `orphans`: keys of all orphans of the cloud.
        """
        for key in [key for key in self._refused if key.startswith(cloud) and key not in orphans]:
            del self._refused[key]
        self._spared = {key for key in self._spared if not key.startswith(cloud) or key in orphans}

    async def _post(self, key: str, handle: Handle, kind: str, message: str, when: str) -> None:
        mark = hashlib.sha256(key.encode()).hexdigest()[:20]
        machine = {"provider": handle.provider, "machine": handle.id, "name": handle.name}
        await self._context.store.post(Notice(id=f"orphan-{mark}-{when}", kind=kind, message=message, data=machine))


def _named(handle: Handle) -> str:
    return f"{handle.name} ({handle.id}) at {handle.provider}, which belongs to no live attempt,"
