"""One look at a running attempt, shared by liveness and interruption: beats, final word, inventory."""

from collections.abc import Sequence, Set
from dataclasses import replace

from broker.controllers.beats import Beats, Watch, read_final
from broker.controllers.context import Context
from broker.controllers.inventory import Inventory
from broker.decide.billing import counted
from broker.decide.liveness import TAKEN_AWAY, Observation
from broker.domain.ids import AttemptId
from broker.domain.job import Attempt
from broker.ports import Leased


class Looker:
    def __init__(self, context: Context, inventory: Inventory, beats: Beats) -> None:
        self._context = context
        self._inventory = inventory
        self.beats = beats
        self._watched_from: dict[AttemptId, float] = {}

    async def refresh(self, leased: Sequence[Leased]) -> set[str]:
        """Fresh beats, and listings of the clouds that these attempts are at: another one that hangs holds nobody up.

        Returns the providers that could not be listed just now.
        """
        failed = await self._inventory.refresh_all({one.attempt.line.offer.provider for one in leased})
        await self.beats.refresh()
        return failed

    async def look(self, attempt: Attempt, unlisted: set[str]) -> tuple[Attempt, Observation]:
        """The attempt with its latest beat, and what was observed."""
        provider = attempt.line.offer.provider
        now = self._context.clock.monotonic()
        watch = await self.beats.latest(attempt.id)
        seen = () if provider in unlisted else self._inventory.seen(provider, attempt.name)
        since = self._watched_from.setdefault(attempt.id, now)
        absent = provider not in unlisted and bool(self._inventory.absent_since(provider, attempt.name, since))
        lost = provider not in unlisted and attempt.line.nodes > 1
        lost = lost and self._inventory.node_lost(provider, attempt.handles, since)
        final = None
        if absent or lost or _final_is_likely(watch) or any(o.state in TAKEN_AWAY or o.fault for o in seen):
            final = await read_final(self._context, attempt.id)
        observation = Observation(
            beat=watch.beat if watch else None,
            beat_age_s=now - watch.changed if watch else (now - since if attempt.first_beat_at else None),
            step_age_s=now - watch.step_changed if watch and watch.beat and watch.beat.step else None,
            final=final,
            seen=seen,
            absent=absent,
            node_lost=lost,
            store_ok=self.beats.readable,
        )
        beat = watch.beat if watch and watch.beat else attempt.beat
        running_at = self._inventory.running_at(attempt)
        looked = replace(attempt, beat=beat, final=final or attempt.final, running_at=running_at)
        return counted(attempt, looked), observation

    def keep(self, live: Set[AttemptId]) -> None:
        """Forgets all others."""
        self._watched_from = {attempt: at for attempt, at in self._watched_from.items() if attempt in live}
        self.beats.keep(live)


def _final_is_likely(watch: Watch | None) -> bool:
    return watch is not None and watch.beat is not None and watch.beat.phase == "done"
