"""Checks that no machine without an owner runs for long, and that the sweep spares the machines of a backup."""

from typing import TYPE_CHECKING

from tests.sim.measures import attempt_of_machine

if TYPE_CHECKING:
    from tests.sim.world import World


class Orphans:
    def __init__(self, world: "World") -> None:
        self._world = world
        self._since: dict[str, float] = {}
        self.unanswered: set[str] = set()
        """Machines whose latest destroy was requested by a broker and not answered. The request is repeated."""

    def tick(self) -> None:
        world, now = self._world, self._world.loop.time()
        longest_s = 2 * world.cloud.caps.list_lag_s + 3 * world.intervals.sweep_s + 30  # one of them may leave it out
        orphans = [orphan for orphan in world.cloud.standing() if not self._has_an_owner(orphan)]
        self._since = {orphan: self._since.get(orphan, now) for orphan in orphans}
        for orphan, since in self._since.items():
            if world.watch.calm_s(since) > longest_s:
                world.fail("no_leak", f"{orphan} stands for {now - since:.0f} s, and has no owner")

    def _has_an_owner(self, machine_id: str) -> bool:
        """Return True if the machine has an owner. A user ends machines whose rows a restored backup has lost."""
        own = attempt_of_machine(machine_id)
        row = self._world.state.attempts.get(own)
        if row is None:
            return own in self._world.backups.attempts
        return self._world.cloud.has_owner(machine_id, row.value)

    def swept(self, machine_id: str) -> None:
        """Check that the sweep destroys a machine that was an orphan for a list lag.

        A repeated request may meet a machine that the cloud has created since under the same id.
        """
        world, watch = self._world, self._world.watch
        if machine_id not in world.cloud.standing() or machine_id in self.unanswered:
            return
        own = attempt_of_machine(machine_id)
        row = world.state.attempts.get(own)
        if row is None and own in world.backups.attempts:
            return world.fail("spared_stands", f"{machine_id} was swept, which was bought after the backup")
        if row is None or row.value.live:
            return watch.measures.wanted(own, world.cloud.surplus - {machine_id})
        born = max((one.born for one in watch.stands if one.id == machine_id), default=0.0)
        age_s = world.loop.time() - max(born, watch.entered_at(own))
        if age_s < world.cloud.caps.list_lag_s:
            world.fail("orphan_grace", f"{machine_id} was swept, an orphan for {age_s:.1f} s")

    def restored(self) -> None:
        """Record that brokers start on the restored database."""
        self._since = {}
