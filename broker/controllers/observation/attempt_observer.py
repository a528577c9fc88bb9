"""Observes one live attempt: heartbeats, final report and listings. Shared by liveness and interruption.

Steps: refresh listings and heartbeats for all claimed attempts, gather the facts of one attempt, interpret them.
`gather` reads; `interpret` is pure. Its result, `AttemptObservation`, is judged in `broker.lifecycle.liveness`.
"""

import logging
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from broker.billing.accrual import counted
from broker.controllers.base.context import ControllerContext
from broker.controllers.observation.absence import AbsenceProof
from broker.controllers.observation.heartbeats import HeartbeatReader, HeartbeatRecord, read_final
from broker.controllers.observation.inventory import Inventory
from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import AttemptId
from broker.domain.instance import Observed
from broker.domain.job import Attempt
from broker.lifecycle.liveness import TAKEN_AWAY, AttemptObservation, poll_share, recorded_machines
from broker.ports import Leased
from trainer.contract.documents import Final

log = logging.getLogger(__name__)

MIN_POLL_S = 0.5
"""Shortest pause between two polls of a machine whose heartbeats are missing."""


@dataclass(frozen=True, kw_only=True)
class ObservedFacts:
    """All that was read about one attempt. Times are monotonic."""

    has_beaten: bool
    """True if a heartbeat of this attempt was recorded before."""
    heartbeat: HeartbeatRecord | None
    """Heartbeats of node 0; None: there is none."""
    read_at: float
    """Time of the latest list of heartbeats: the silence after it is unknown."""
    watched_from: float
    """Time from which this process has watched the attempt; its machines existed by then."""
    machines: tuple[Observed, ...] = ()
    """Machines of the attempt in the latest listing; also empty if the cloud did not answer."""
    proof: AbsenceProof = field(default_factory=AbsenceProof)
    """Absence that listings prove; no level holds if the cloud did not answer."""
    peers_silent_s: float | None
    """Longest silence of a node other than the first that is not done; None: there is no such node."""
    store_ok_s: float | None
    """Seconds for which heartbeats have been readable; None: heartbeats or the final report cannot be read now."""
    final: Final | None = None
    """Final report; None: there is none, or it was not looked for."""
    finished: int = 0
    """Number of nodes other than the first that are done."""

    @property
    def shows_end(self) -> bool:
        """True if the listings show that the attempt may have ended."""
        proof = self.proof
        is_missing = proof.proven or proof.missing_for_seconds or bool(proof.lost)
        return is_missing or any(machine.state in TAKEN_AWAY or machine.fault for machine in self.machines)


def interpret(facts: ObservedFacts) -> AttemptObservation:
    """Return the observation that the facts amount to."""
    heartbeat, read_at = facts.heartbeat, facts.read_at
    age_s = progress_age_s = None
    if heartbeat is not None:
        age_s = read_at - heartbeat.changed
        progress_age_s = max(0.0, read_at - heartbeat.progressed) if heartbeat.beat else None
    elif facts.has_beaten:  # no heartbeat is listed here, so its silence counts from the first observation
        age_s = max(0.0, read_at - facts.watched_from)
    return AttemptObservation(
        beat=heartbeat.beat if heartbeat else None,
        beat_age_s=age_s,
        progress_age_s=progress_age_s,
        final=facts.final,
        seen=facts.machines,
        absent=facts.proof.proven,
        missing_from_listings=facts.proof.missing_for_seconds,
        lost=facts.proof.lost,
        peers_silent_s=facts.peers_silent_s,
        finished=facts.finished,
        store_ok_s=facts.store_ok_s,
    )


class AttemptObserver:
    def __init__(self, context: ControllerContext, inventory: Inventory, beats: HeartbeatReader) -> None:
        self._context = context
        self._inventory = inventory
        self.beats = beats
        self._watched_from: dict[AttemptId, float] = {}
        """Monotonic time of the first observation of an attempt that was booting or later."""
        self._poll_s: dict[AttemptId, float] = {}
        """Seconds between two polls of attempts that are polled more often than usual."""

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
        for attempt in (row.attempt for row in leased if row.attempt.id in self._poll_s):
            known = ages.get(attempt.line.offer.provider, self._context.intervals.list_s)
            ages[attempt.line.offer.provider] = min(known, self._poll_s[attempt.id])
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
        facts = await self.gather(attempt, is_listed=attempt.line.offer.provider not in unlisted)
        observation = interpret(facts)
        self._set_poll(attempt, observation, is_listed=attempt.line.offer.provider not in unlisted)
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
        if not (facts.shows_end or self._final_is_likely(attempt, heartbeat, read_at)):
            return facts
        return await self._with_end(attempt, facts)

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

    def _final_is_likely(self, attempt: Attempt, heartbeat: HeartbeatRecord | None, read_at: float) -> bool:
        """Return True if a heartbeat says that the agent is done, or is missing: the lost one may have said so."""
        if heartbeat is None:
            return False
        peers_s = self.beats.peers_silent_s(attempt.id, attempt.line.nodes)
        silent_s = max(read_at - heartbeat.changed, peers_s if peers_s is not None and peers_s < math.inf else 0.0)
        return heartbeat.done or silent_s >= self._context.timeouts.three_beats_s

    def _set_poll(self, attempt: Attempt, observation: AttemptObservation, *, is_listed: bool) -> None:
        """Poll an attempt more often while a heartbeat is missing and its cloud answers."""
        share = poll_share(observation, self._context.timeouts) if is_listed else 0.0
        if share == 0.0:
            self._poll_s.pop(attempt.id, None)
            return
        calls_per_s = share * self._context.provider_of(attempt).caps.calls_per_s
        self._poll_s[attempt.id] = max(MIN_POLL_S, 1 / calls_per_s)

    def poll_in_s(self, attempt: AttemptId) -> float:
        """Return the seconds until an attempt is polled again."""
        return min(self._context.intervals.look_s, self._poll_s.get(attempt, float("inf")))

    def keep(self, live: Set[AttemptId]) -> None:
        """Forget attempts that are not live."""
        self._poll_s = {attempt: poll_s for attempt, poll_s in self._poll_s.items() if attempt in live}
        self._watched_from = {attempt: at for attempt, at in self._watched_from.items() if attempt in live}
        self.beats.keep(live)
