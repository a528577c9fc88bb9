"""Observes one live attempt: heartbeats, final report and listings. Shared by liveness and interruption.

Steps: refresh listings and heartbeats for all claimed attempts, gather the facts of one attempt, interpret them.
Facts: see `ObservedFacts`. Decisions: whether the final report is read, and how soon the attempt is polled again. The
observation itself is judged in `broker.lifecycle.liveness`.
"""

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from broker.billing.accrual import counted
from broker.controllers.base.context import ControllerContext
from broker.controllers.observation.heartbeats import HeartbeatReader, read_final
from broker.controllers.observation.inventory import Inventory
from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import AttemptId
from broker.domain.instance import Observed
from broker.domain.job import Attempt, AttemptState
from broker.lifecycle.liveness import AttemptObservation, recorded_machines
from broker.lifecycle.observation.attempt_facts import (
    ObservedFacts,
    final_is_likely,
    interpret,
    next_poll_s,
    steady_poll_s,
)
from broker.lifecycle.observation.proof import AbsenceProof
from broker.ports import Leased

log = logging.getLogger(__name__)

LISTING_SHARE = 0.1
"""Maximum age of a listing while all polled attempts are steady, as a share of the interval between their polls."""


class AttemptObserver:
    def __init__(self, context: ControllerContext, inventory: Inventory, beats: HeartbeatReader) -> None:
        self._context = context
        self._inventory = inventory
        self.beats = beats
        self._watched_from: dict[AttemptId, float] = {}
        """Monotonic time of the first observation of an attempt that was booting or later."""
        self._poll_s: dict[AttemptId, float] = {}
        """Seconds between two polls of attempts that are polled more often than usual."""
        self._steady: set[AttemptId] = set()
        """Attempts that train and send heartbeats. The more there are, the less often they are polled."""

    @property
    def turns(self) -> Mapping[str, float]:
        """See `Inventory.turns`."""
        return self._inventory.turns

    def trouble(self, provider: str) -> str:
        """See `Inventory.trouble`."""
        return self._inventory.trouble(provider)

    async def refresh(self, leased: Sequence[Leased]) -> set[str]:
        """Refresh heartbeats, and the listings of the clouds of these attempts. Return the clouds that did not answer.

        Other clouds are not listed, so a cloud that hangs delays only its own attempts. Without the blob store, the
        listings still show wrong machines, and a drain still ends after its time.
        """
        ages: dict[str, float] = {}
        if all(row.attempt.id in self._steady for row in leased):
            list_s = max(self._context.intervals.list_s, self._steady_s * LISTING_SHARE)
            ages = {row.attempt.line.offer.provider: list_s for row in leased}
        for attempt in (row.attempt for row in leased if row.attempt.id in self._poll_s):
            age_s = ages.get(attempt.line.offer.provider, self._context.intervals.list_s)
            ages[attempt.line.offer.provider] = min(age_s, self._poll_s[attempt.id])
        failed = await self._inventory.refresh_all({row.attempt.line.offer.provider for row in leased}, ages)
        try:
            await self.beats.refresh()
        except BlobsUnavailable as e:
            log.warning("heartbeats cannot be read, so a missing heartbeat means nothing: %s", e)
        return failed

    async def observe(self, attempt: Attempt, unlisted: set[str]) -> tuple[Attempt, AttemptObservation]:
        """Return the attempt with its latest heartbeat, and the observation. Raises BlobsUnavailable.

        `unlisted`: clouds that did not answer the latest refresh.
        """
        is_listed = attempt.line.offer.provider not in unlisted
        facts = await self.gather(attempt, is_listed=is_listed)
        observation = interpret(facts)
        self._set_poll(attempt, observation, is_listed=is_listed)
        beat = observation.beat or attempt.beat
        running_at = self._inventory.running_at(attempt)
        updated = replace(attempt, beat=beat, final=observation.final or attempt.final, running_at=running_at)
        return counted(attempt, updated), observation

    async def gather(self, attempt: Attempt, *, is_listed: bool) -> ObservedFacts:
        """Read all facts about one attempt.

        Raises BlobsUnavailable when the listings show an end and the final report, which explains it, is unreadable.
        """
        provider, nodes = attempt.line.offer.provider, attempt.line.nodes
        now, read_at = self._context.clock.monotonic(), self.beats.listed_at
        heartbeat = await self.beats.latest(attempt.id)
        watched_from = self._watched_from.setdefault(attempt.id, now)
        machines: tuple[Observed, ...] = ()
        proof = AbsenceProof()
        if is_listed:
            machines = recorded_machines(attempt, self._inventory.listed(provider, attempt.name))
            handles = attempt.handles if nodes > 1 else ()
            proof = self._inventory.absence(provider, attempt.name, watched_from, handles=handles)
        facts = ObservedFacts(
            has_beaten=attempt.first_beat_at is not None,
            heartbeat=heartbeat,
            read_at=read_at,
            watched_from=watched_from,
            machines=machines,
            proof=proof,
            peers_silent_s=self.beats.peers_silent_s(attempt.id, nodes),
            store_ok_s=self.beats.readable_s,
        )
        if facts.shows_end or final_is_likely(facts, self._context.timeouts):
            return await self._with_end(attempt, facts)
        return facts

    async def _with_end(self, attempt: Attempt, facts: ObservedFacts) -> ObservedFacts:
        """Add the final report and the number of nodes that are done."""
        try:
            final = await read_final(self._context, attempt.id)
            finished = await self.beats.finished(attempt.id, attempt.line.nodes)
        except BlobsUnavailable:
            if facts.shows_end:
                raise
            return replace(facts, store_ok_s=None)  # the listings are judged; a missing heartbeat is not
        peers_silent_s = self.beats.peers_silent_s(attempt.id, attempt.line.nodes)
        return replace(facts, final=final, finished=finished, peers_silent_s=peers_silent_s)

    def _set_poll(self, attempt: Attempt, observation: AttemptObservation, *, is_listed: bool) -> None:
        """Poll an attempt more often while a heartbeat is missing and its cloud answers."""
        poll_s = None
        if is_listed:
            calls_per_s = self._context.provider_of(attempt).caps.calls_per_s
            poll_s = next_poll_s(observation, self._context.timeouts, calls_per_s)
        is_beating = attempt.state is AttemptState.TRAINING and observation.beat_age_s is not None
        if poll_s is None and is_beating and is_listed and observation.final is None:
            self._steady.add(attempt.id)
        else:
            self._steady.discard(attempt.id)
        if poll_s is None:
            self._poll_s.pop(attempt.id, None)
        else:
            self._poll_s[attempt.id] = poll_s

    def poll_in_s(self, attempt: AttemptId) -> float:
        """Return the seconds until an attempt is polled again."""
        if attempt in self._steady:
            return self._steady_s
        return min(self._context.intervals.look_s, self._poll_s.get(attempt, float("inf")))

    @property
    def _steady_s(self) -> float:
        return steady_poll_s(len(self._watched_from), self._context.intervals.look_s)

    def keep(self, live: Set[AttemptId]) -> None:
        """Forget attempts that are not live."""
        self._poll_s = {attempt: poll_s for attempt, poll_s in self._poll_s.items() if attempt in live}
        self._steady &= live
        self._watched_from = {attempt: at for attempt, at in self._watched_from.items() if attempt in live}
        self.beats.keep(live)
