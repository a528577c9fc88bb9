"""Facts that one poll reads about a live attempt, and their interpretation as an `AttemptObservation`.

`broker.controllers.observation.attempt_observer` gathers `ObservedFacts`; `broker.lifecycle.liveness` judges the
observation.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from broker.domain.instance import Observed
from broker.lifecycle.liveness import TAKEN_AWAY, AttemptObservation, LivenessTimeouts, poll_share
from broker.lifecycle.observation.proof import AbsenceProof
from trainer.contract.documents import Final, Heartbeat

STEADY_ATTEMPTS = 400
"""Number of watched attempts beyond which those that send heartbeats are polled less often, at the same total rate."""
MAX_STEADY_S = 60.0
"""Longest time between two polls of an attempt, in seconds."""
MIN_POLL_S = 0.5
"""Shortest pause between two polls of a machine whose heartbeats are missing."""


@dataclass
class HeartbeatRecord:
    """Heartbeats of one node. Times are monotonic."""

    etag: str
    changed: float
    """Time at which this process observed the latest change of `etag`."""
    beat: Heartbeat | None = None
    """The content of the latest heartbeat; None: not read yet, or invalid."""
    progress: tuple[Any, ...] = ()
    """See `liveness.progress_of`."""
    progressed: float = 0.0
    """Time at which this process observed the latest change of `progress`."""

    @property
    def done(self) -> bool:
        """True if the heartbeat was read and reports that the agent is done."""
        return self.beat is not None and self.beat.phase == "done"


@dataclass(frozen=True, kw_only=True)
class ObservedFacts:
    """All that was read about one attempt. Times are monotonic."""

    has_beaten: bool
    """True if a heartbeat of this attempt was recorded before."""
    heartbeat: HeartbeatRecord | None
    """Heartbeats of node 0; None: there is none."""
    read_at: float
    """Time of the latest LIST of heartbeats. Whether heartbeats followed it is unknown."""
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
    """Return the observation that follows from the facts."""
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
        listed=facts.machines,
        absent=facts.proof.proven,
        missing_from_listings=facts.proof.missing_for_seconds,
        lost=facts.proof.lost,
        peers_silent_s=facts.peers_silent_s,
        finished=facts.finished,
        store_ok_s=facts.store_ok_s,
    )


def final_is_likely(facts: ObservedFacts, timeouts: LivenessTimeouts) -> bool:
    """Return True if a heartbeat states that the agent is done, or if a missing heartbeat may have stated it."""
    heartbeat, peers_s = facts.heartbeat, facts.peers_silent_s
    if heartbeat is None:
        return False
    silent_s = max(facts.read_at - heartbeat.changed, peers_s if peers_s is not None and peers_s < math.inf else 0.0)
    return heartbeat.done or silent_s >= timeouts.three_beats_s


def steady_poll_s(watched: int, look_s: float) -> float:
    """Return the seconds between two polls of an attempt that trains and sends heartbeats.

    `watched`: number of attempts that the process watches. `look_s`: interval of few attempts.
    """
    return min(look_s * max(1.0, watched / STEADY_ATTEMPTS), max(look_s, MAX_STEADY_S))


def next_poll_s(observation: AttemptObservation, timeouts: LivenessTimeouts, calls_per_s: float) -> float | None:
    """Return the seconds until a missing heartbeat is polled again; None: the usual interval applies.

    `calls_per_s`: number of calls per second that the cloud accepts.
    """
    share = poll_share(observation, timeouts)
    return None if share == 0.0 else max(MIN_POLL_S, 1 / (share * calls_per_s))
