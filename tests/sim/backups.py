"""Restore of a database backup: later writes are lost, so machines and objects exist that no row records."""

import asyncio
import copy
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

from broker.domain.ids import AttemptId, JobId
from broker.domain.job import Attempt, AttemptState, Job
from tests.sim.faults import Fault
from tests.sim.measures import attempt_of_machine
from tests.support.memory_store.state import MemoryRow
from trainer.contract import object_keys as keys

if TYPE_CHECKING:
    from tests.sim.world import World

DOWN_S = 30.0
"""Minimum seconds from the end of the last broker to the start of the first one on the restored copy."""
POLL_S = 60.0
"""Seconds between two checks of users for machines without a row."""
TIMEOUT_S = 900.0
"""Seconds after which users end such machines even if these still train."""
OF_SERVER = frozenset({"clock", "hints", "trusted_now"})
"""Columns of the store that a backup does not contain."""


class Backups:
    def __init__(self, world: "World") -> None:
        self._world = world
        self.attempts: dict[AttemptId, Attempt] = {}
        """Attempts that were admitted after the backup, with their last rows."""
        self.jobs: dict[JobId, Job] = {}
        """Jobs that were submitted after the backup."""

    def attempt(self, own: AttemptId) -> Attempt | None:
        """Return an attempt's row, or its last row if the restore has lost it."""
        row = self._world.state.attempts.get(own)
        return self.attempts.get(own) if row is None else row.value

    def job(self, own: JobId) -> Job | None:
        row = self._world.state.jobs.get(own)
        return self.jobs.get(own) if row is None else row.value

    async def restore(self, fault: Fault) -> None:
        """Make a backup now, and restore it at the end of the fault.

        All brokers and their launchers are stopped before the restore, as docs/guide/operating.md requires.
        """
        world, made_at = self._world, self._world.loop.time()
        backup = copied(vars(world.state))
        await asyncio.sleep(max(0.0, fault.for_s - DOWN_S))
        world.strikes.note(fault.kind)
        world.happenings.all_leave(made_at)
        for launch in world.launches:
            assert launch.work is not None
            launch.work.cancel()
        self._put_back(backup, made_at)
        await asyncio.sleep(DOWN_S)
        world.watch.restored_at(world.loop.time())
        world.happenings.all_return()
        world.spawn(self._end_unknown(), "people end what no row knows")

    def _put_back(self, backup: Mapping[str, Any], made_at: float) -> None:
        world, state = self._world, self._world.state
        before, jobs = dict(state.attempts), dict(state.jobs)
        vars(state).update(copied(backup))
        self.attempts |= _lost(before, state.attempts.keys())
        self.jobs |= _lost(jobs, state.jobs.keys())
        world.expected -= len(self.jobs.keys() & set(world.jobs))
        world.jobs = [own for own in world.jobs if own not in self.jobs]
        unsent = {i for i, row in state.attempts.items() if row.value.create_sent_at is None}
        world.watch.restored(self.jobs.keys(), unsent, made_at)
        lost = f"{len(self.attempts)} attempts and {len(self.jobs)} jobs"
        world.note("fault", f"the backup of {made_at:.0f} is restored, without {lost}")

    async def _end_unknown(self) -> None:
        """Destroy machines without a row, as `gpubroker sweep --once --destroy --spared` does: ended ones first, later
        all.
        """
        world, since = self._world, self._world.loop.time()
        while True:
            await asyncio.sleep(POLL_S)
            standing = {*world.cloud.standing()}
            for machine in [one for one in await world.cloud.list() if one.handle.id in standing]:
                own = attempt_of_machine(machine.handle.id)
                if own not in self.attempts:
                    continue
                if keys.final(own) in world.objects.data or world.loop.time() - since > TIMEOUT_S:
                    world.note("people", f"destroy {machine.handle.id}, which no row knows")
                    await world.cloud.destroy(machine.handle)

    def issues_again(self, new: Attempt) -> bool:
        """Return True if the number of a lost attempt is issued again although its spec is in the blob store."""
        known = self.attempts.pop(new.id, None)
        return known is not None and keys.spec(new.id) in self._world.objects.data

    def came_late(self, made_at: float) -> Set[str]:
        """Return machines that came after the backup for attempts terminating at that moment. Machines that have gone
        again have no row.
        """
        rows = self._world.state.attempts
        ending = {own for own, row in rows.items() if row.value.state is AttemptState.TERMINATING}
        return {one.id for one in self._world.watch.stands if one.attempt in ending and one.born > made_at}

    def is_lost(self, own: AttemptId, machines: Set[str]) -> bool:
        """Return True if a restored row has machines that are gone without a final report."""
        attempt = self._world.state.attempts[own].value
        if attempt.state not in (AttemptState.BOOTING, AttemptState.TRAINING):
            return False
        gone = {handle.id for handle in attempt.handles} - machines
        return bool(gone) and keys.final(own) not in self._world.objects.data


def copied(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a memory store's `State` that a backup contains."""
    return copy.deepcopy({name: value for name, value in columns.items() if name not in OF_SERVER})


def _lost(before: Mapping[Any, MemoryRow[Any]], backup: Set[Any]) -> dict[Any, Any]:
    return {own: row.value for own, row in before.items() if own not in backup}
