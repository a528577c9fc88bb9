"""Decides whether an attempt is alive, dead or unknown, from heartbeats, the cloud's listings and notices."""

import math
from dataclasses import dataclass
from datetime import datetime

from broker.billing.prices import exceeds_offer_price
from broker.domain.instance import InstanceState, Liveness, Observed
from broker.domain.job import Attempt, AttemptState
from broker.domain.money import format_usd
from broker.domain.offer import GIB, Offer
from broker.lifecycle.idle import LIMITED, SETUP
from broker.lifecycle.state_machine import AttemptEvent
from trainer.contract.documents import Final, Heartbeat

TAKEN_AWAY = frozenset({InstanceState.GONE, InstanceState.STOPPED})
"""States of a machine that the cloud took away, because the broker never stops machines. A stopped machine bills until
its destroy.
"""
MEMORY_SHARE = 0.9
"""Share of the offer's memory that a machine must show; the driver reserves the rest."""


@dataclass(frozen=True, kw_only=True)
class LivenessTimeouts:
    """Limits in seconds. Only time in which this process could observe heartbeats counts towards `silence_s`."""

    beat_s: float = 5.0
    """Heartbeat interval that is configured in the agents."""
    lost_s: float = 20.0
    """Heartbeat age after which a listing without the machine is believed."""
    stopped_s: float = 10.0
    """Minimum of `stopped_after_s`."""
    silence_s: float = 300.0
    """Heartbeat age after which a listed attempt counts as hung."""
    hang_s: float = 1800.0
    """Time without a new step, once training has begun."""
    stuck_s: float = 7200.0
    """Time without reported progress before the first step, and in evaluation, sampling or saves. Uploads of the agent
    may take an hour.
    """
    notice_s: float = 150.0
    """A preemption notice is acted on when it is at most this far ahead."""

    @property
    def late_s(self) -> float:
        """Heartbeat age, in seconds, after which a heartbeat is missing and the cloud is polled more often."""
        return 1.5 * self.beat_s

    @property
    def stopped_after_s(self) -> float:
        """Heartbeat age after which a 'stopped' listing is believed.

        Marketplace hosts briefly list running machines as stopped.
        """
        return max(self.stopped_s, 2 * self.beat_s)

    @property
    def three_beats_s(self) -> float:
        """Heartbeat age after which a machine that listings omit is believed to be gone."""
        return 3 * self.beat_s


@dataclass(frozen=True, kw_only=True)
class AttemptObservation:
    """Facts that one poll gathered about an attempt.

    `beat_age_s`, `progress_age_s`: seconds since this process observed a change, excluding time in which it could not
    observe changes. None: there is no heartbeat. For several machines both are those of node 0.
    """

    beat: Heartbeat | None = None
    beat_age_s: float | None = None
    progress_age_s: float | None = None
    final: Final | None = None
    listed: tuple[Observed, ...] = ()
    absent: bool = False
    """True when two listings at least `list_lag_s` apart show no machine. Both began long enough after the create."""
    missing_from_listings: bool = False
    """True when several consecutive listings omit machines that existed for longer than the listing lag."""
    lost: frozenset[str] = frozenset()
    """Ids of recorded machines of a multi-node attempt that are proven absent individually; see `AbsenceProof.lost`."""
    peers_silent_s: float | None = None
    """Longest heartbeat age of the unfinished machines other than node 0; infinite: a machine has sent none. None: no
    other machine.
    """
    finished: int = 0
    """Number of machines other than node 0 that are done. Each may shut itself down while node 0 uploads results."""
    store_ok_s: float | None = math.inf
    """Seconds for which heartbeats have been readable; None: the blob store cannot be read, so silence proves nothing.
    """

    @property
    def store_ok(self) -> bool:
        return self.store_ok_s is not None

    @property
    def silent_s(self) -> float:
        """Longest heartbeat age of all machines."""
        return max(math.inf if self.beat_age_s is None else self.beat_age_s, self.peers_silent_s or 0.0)


def recorded_machines(attempt: Attempt, listed: tuple[Observed, ...]) -> tuple[Observed, ...]:
    """Return the listed machines with recorded handles, once all nodes are recorded.

    Extra machines are then ignored, because they are being destroyed and prove nothing about the attempt.
    """
    recorded = {handle.id for handle in attempt.handles}
    return (
        tuple(machine for machine in listed if machine.handle.id in recorded)
        if len(recorded) >= attempt.line.nodes
        else listed
    )


def liveness(expected_nodes: int, observation: AttemptObservation, timeouts: LivenessTimeouts) -> Liveness:
    """Return ALIVE by fresh heartbeats, DEAD only by the cloud's listings, otherwise UNKNOWN, which frees no money."""
    states = [machine.state for machine in observation.listed]
    age_s = math.inf if observation.beat_age_s is None else observation.beat_age_s
    if not (len(_stopped_machines(observation)) <= observation.finished and age_s < timeouts.lost_s):
        if observation.lost or InstanceState.GONE in states:
            return Liveness.DEAD
        if (
            InstanceState.STOPPED in states
            and observation.store_ok
            and observation.silent_s >= timeouts.stopped_after_s
        ):
            return Liveness.DEAD
    if (
        observation.missing_from_listings
        and observation.store_ok
        and not states
        and timeouts.three_beats_s <= age_s < math.inf
    ):
        return Liveness.DEAD
    if age_s < timeouts.lost_s:
        return Liveness.ALIVE
    if observation.absent and not states:
        return Liveness.DEAD
    running = len(states) >= expected_nodes and all(s is InstanceState.RUNNING for s in states)
    return Liveness.ALIVE if running and observation.beat is None else Liveness.UNKNOWN


def _stopped_machines(observation: AttemptObservation) -> set[str]:
    """Return the machines that no longer run according to the cloud."""
    return {machine.handle.id for machine in observation.listed if machine.state in TAKEN_AWAY} | observation.lost


def poll_share(observation: AttemptObservation, timeouts: LivenessTimeouts) -> float:
    """Return the share of the cloud's call budget for polling this attempt's machines; 0: the usual interval.

    A missing heartbeat may mean that the machine is gone. If no machine is listed either, the share is 1, so that a few
    more listings decide quickly. While machines are listed, it is 0.5 until the heartbeat age reaches 12 intervals.
    """
    age_s = observation.beat_age_s
    if age_s is None or not observation.store_ok:
        return 0.0
    if observation.peers_silent_s is not None and observation.peers_silent_s < math.inf:
        age_s = max(age_s, observation.peers_silent_s)
    if age_s < timeouts.late_s:
        return 0.0
    if not observation.listed:
        return 1.0
    return 0.5 if age_s < 12 * timeouts.beat_s else 0.0


def mismatch_message(offer: Offer, machines: tuple[Observed, ...]) -> str | None:
    """Return the difference between the machines bought and listed; None: nothing contradicts the offer."""
    for machine in machines:
        if machine.accelerator is not None and machine.accelerator != offer.accelerator:
            return f"asked for {offer.accelerator}, got {machine.accelerator}"
        if machine.gpus is not None and machine.gpus != offer.gpus:
            return f"asked for {offer.gpus} GPUs, got {machine.gpus}"
        if machine.gpu_memory_bytes is not None and machine.gpu_memory_bytes < MEMORY_SHARE * offer.gpu_memory_bytes:
            return f"asked for {offer.gpu_memory_bytes / GIB:.0f} GiB a GPU, got {machine.gpu_memory_bytes / GIB:.0f}"
        if machine.spot is not None and machine.spot != offer.spot:
            return f"asked for {'spot' if offer.spot else 'on-demand'}, got the other kind"
        price = machine.usd_per_hour
        if price is not None and not machine.price_moves and exceeds_offer_price(price, offer):
            return f"asked for {format_usd(offer.usd_per_hour)}/h, billed {format_usd(price)}/h"
    return None


def fault_message(machines: tuple[Observed, ...]) -> str | None:
    """Return why one of these machines will never run its agent, in one line; None: no fault is reported."""
    return next((machine.fault for machine in machines if machine.fault), None)


def judge(
    attempt: Attempt, observation: AttemptObservation, now: datetime, timeouts: LivenessTimeouts, boot_deadline_s: float
) -> AttemptEvent | None:
    """Return the event that follows from an observation of a booting, training or draining attempt; None: no event."""
    if observation.final is not None:
        return AttemptEvent.FINAL
    if liveness(attempt.line.nodes, observation, timeouts) is Liveness.DEAD:
        return AttemptEvent.GONE
    if attempt.state is AttemptState.BOOTING:
        return _judge_booting(attempt, observation, now, timeouts, boot_deadline_s)
    if _notice_is_near(observation, timeouts):
        return AttemptEvent.NOTICE
    if attempt.state is AttemptState.TRAINING and _is_hung(attempt.line.nodes, observation, timeouts, boot_deadline_s):
        return AttemptEvent.HUNG
    return None


def _judge_booting(
    attempt: Attempt, observation: AttemptObservation, now: datetime, timeouts: LivenessTimeouts, boot_deadline_s: float
) -> AttemptEvent | None:
    if mismatch_message(attempt.line.offer, observation.listed):
        return AttemptEvent.MISMATCH
    if observation.beat is not None and observation.peers_silent_s != math.inf:  # every machine has sent a heartbeat
        return AttemptEvent.FIRST_BEAT
    if fault_message(observation.listed):
        return AttemptEvent.SETUP_FAILED
    if any(machine.notice_s is not None for machine in observation.listed):
        return AttemptEvent.NOTICE
    is_late = (now - (attempt.create_sent_at or now)).total_seconds() > boot_deadline_s
    # While the blob store was unreachable, agents could not write heartbeats, so the deadline waits for `lost_s`.
    readable = observation.store_ok_s is not None and observation.store_ok_s >= timeouts.lost_s
    return AttemptEvent.DEADLINE if is_late and readable else None


def _notice_is_near(observation: AttemptObservation, timeouts: LivenessTimeouts) -> bool:
    notices = [machine.notice_s for machine in observation.listed if machine.notice_s is not None]
    if observation.beat is not None and observation.beat.notice_s is not None:
        notices.append(observation.beat.notice_s)
    return any(notice_s <= timeouts.notice_s for notice_s in notices)


def _is_hung(nodes: int, observation: AttemptObservation, timeouts: LivenessTimeouts, boot_deadline_s: float) -> bool:
    """Return True if the attempt is silent or stuck although the cloud lists all its machines.

    The result is False until heartbeats have been readable for `lost_s`. It is also False if the listing omits a
    machine, because that machine may be gone. A machine that restarts gets its boot time.
    """
    readable = observation.store_ok_s is not None and observation.store_ok_s >= timeouts.lost_s
    existing = [machine for machine in observation.listed if machine.state not in TAKEN_AWAY]
    if len(existing) < max(1, nodes - observation.finished) or not readable:
        return False
    running = all(machine.state is InstanceState.RUNNING for machine in existing)
    silence_s = timeouts.silence_s if running else max(timeouts.silence_s, boot_deadline_s)
    ages = [age for age in (observation.beat_age_s, observation.peers_silent_s) if age is not None and age < math.inf]
    silent = any(age >= silence_s for age in ages)
    return silent or (running and _is_stuck(observation, timeouts))


def progress_of(beat: Heartbeat) -> tuple[object, ...]:
    """Return the values that change with progress.

    A step shows progress of training; messages, saves and sent bytes show progress of other phases.
    """
    if beat.phase == "training":
        return beat.phase, beat.step
    saved = beat.checkpoint.step if beat.checkpoint else 0
    return beat.phase, beat.step, beat.message, saved, beat.sent_bytes >> 20


def _is_stuck(observation: AttemptObservation, timeouts: LivenessTimeouts) -> bool:
    """Return True if no progress was reported for too long. Set-up is excluded: `idle.py` or the agent limits it."""
    if observation.beat is None or observation.beat.phase in SETUP | LIMITED or observation.progress_age_s is None:
        return False
    trains = observation.beat.phase == "training" and observation.beat.step > 0
    return observation.progress_age_s >= (timeouts.hang_s if trains else timeouts.stuck_s)
