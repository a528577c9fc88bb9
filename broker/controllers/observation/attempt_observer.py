"""One look at a running attempt, shared by liveness and interruption: beats, final word, inventory."""

import logging
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from broker.billing.accrual import counted
from broker.controllers.base.context import ControllerContext
from broker.controllers.observation.heartbeats import HeartbeatReader, HeartbeatRecord, read_final
from broker.controllers.observation.inventory import Inventory
from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import AttemptId
from broker.domain.job import Attempt
from broker.lifecycle.liveness import TAKEN_AWAY, AttemptObservation, poll_share, recorded_machines
from broker.ports import Leased

log = logging.getLogger(__name__)

SOONEST_S = 0.5
"""Between two looks for a machine whose beats are missing."""


class AttemptObserver:
    def __init__(self, context: ControllerContext, inventory: Inventory, beats: HeartbeatReader) -> None:
        self._context = context
        self._inventory = inventory
        self.beats = beats
        self._watched_from: dict[AttemptId, float] = {}
        """These stood already then: they were booting, or beyond."""
        self._again_s: dict[AttemptId, float] = {}
        """Of those that are looked for in haste."""

    @property
    def turns(self) -> Mapping[str, float]:
        """As `Inventory.turns`."""
        return self._inventory.turns

    def trouble(self, provider: str) -> str:
        """As `Inventory.trouble`."""
        return self._inventory.trouble(provider)

    async def refresh(self, leased: Sequence[Leased]) -> set[str]:
        """Fresh beats, and listings of the clouds that these attempts are at: another one that hangs holds nobody up.
        Without the blob store the clouds still tell of wrong machines, and a grace ends.

        Returns the providers that could not be listed just now.
        """
        ages: dict[str, float] = {}
        for attempt in (one.attempt for one in leased if one.attempt.id in self._again_s):
            known = ages.get(attempt.line.offer.provider, self._context.rhythm.list_s)
            ages[attempt.line.offer.provider] = min(known, self._again_s[attempt.id])
        failed = await self._inventory.refresh_all({one.attempt.line.offer.provider for one in leased}, ages)
        try:
            await self.beats.refresh()
        except BlobsUnavailable as e:
            log.warning("beats cannot be read, so nobody's silence means anything: %s", e)
        return failed

    async def observe(self, attempt: Attempt, unlisted: set[str]) -> tuple[Attempt, AttemptObservation]:
        """The attempt with its latest beat, and what was observed."""
        provider = attempt.line.offer.provider
        now, heard = self._context.clock.monotonic(), self.beats.heard_at
        watch = await self.beats.latest(attempt.id)
        seen = () if provider in unlisted else recorded_machines(attempt, self._inventory.seen(provider, attempt.name))
        since = self._watched_from.setdefault(attempt.id, now)
        absent = provider not in unlisted and bool(self._inventory.absent_since(provider, attempt.name, since))
        left_out = provider not in unlisted and self._inventory.left_out(provider, attempt.name, since)
        several = provider not in unlisted and attempt.line.nodes > 1
        lost = self._inventory.lost(provider, attempt.handles, since) if several else frozenset[str]()
        gone = absent or left_out or lost or any(o.state in TAKEN_AWAY or o.fault for o in seen)
        final, finished, store_ok_s = None, 0, self.beats.readable_s
        if gone or self._final_is_likely(attempt, watch, heard):
            try:
                final = await read_final(self._context, attempt.id)
                finished = await self.beats.finished(attempt.id, attempt.line.nodes)
            except BlobsUnavailable:
                if gone:
                    raise
                store_ok_s = None  # what the cloud shows is judged; its silence is not
        observation = AttemptObservation(
            beat=watch.beat if watch else None,
            beat_age_s=heard - watch.changed if watch else (max(0.0, heard - since) if attempt.first_beat_at else None),
            progress_age_s=max(0.0, heard - watch.progressed) if watch and watch.beat else None,
            final=final,
            seen=seen,
            absent=absent,
            missing_from_listings=left_out,
            lost=frozenset(lost),
            peers_silent_s=self.beats.peers_silent_s(attempt.id, attempt.line.nodes),
            finished=finished,
            store_ok_s=store_ok_s,
        )
        self._hasten(attempt, observation, listed=provider not in unlisted)
        beat = watch.beat if watch and watch.beat else attempt.beat
        running_at = self._inventory.running_at(attempt)
        looked = replace(attempt, beat=beat, final=final or attempt.final, running_at=running_at)
        return counted(attempt, looked), observation

    def _final_is_likely(self, attempt: Attempt, watch: HeartbeatRecord | None, heard: float) -> bool:
        """It has said so, or is silent, or another machine of it is: the beat that says so may have been lost."""
        if watch is None:
            return False
        mates_s = self.beats.peers_silent_s(attempt.id, attempt.line.nodes)
        silent_s = max(heard - watch.changed, mates_s if mates_s is not None and mates_s < math.inf else 0.0)
        return watch.done or silent_s >= self._context.patience.three_beats_s

    def _hasten(self, attempt: Attempt, seen: AttemptObservation, *, listed: bool) -> None:
        share = poll_share(seen, self._context.patience) if listed else 0.0
        if share == 0.0:
            self._again_s.pop(attempt.id, None)
            return
        calls_per_s = share * self._context.provider_of(attempt).caps.calls_per_s
        self._again_s[attempt.id] = max(SOONEST_S, 1 / calls_per_s)

    def again_s(self, attempt: AttemptId) -> float:
        """Until the next look at it."""
        return min(self._context.rhythm.look_s, self._again_s.get(attempt, float("inf")))

    def keep(self, live: Set[AttemptId]) -> None:
        """Forgets all others."""
        self._again_s = {attempt: at for attempt, at in self._again_s.items() if attempt in live}
        self._watched_from = {attempt: at for attempt, at in self._watched_from.items() if attempt in live}
        self.beats.keep(live)
