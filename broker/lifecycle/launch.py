"""Decides what a poll of a launching attempt means, and whether a quoted offer may still be bought."""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from broker.domain.instance import Caps, InstanceState, Observed
from broker.domain.job import Attempt
from broker.domain.money import format_usd
from broker.domain.offer import Offer
from broker.lifecycle.liveness import TAKEN_AWAY, fault_message, mismatch_message
from broker.lifecycle.state_machine import AttemptEvent
from trainer.contract.documents import Final


@dataclass(frozen=True, kw_only=True)
class LaunchObservation:
    """Facts that one poll gathered about an attempt whose create has not answered."""

    listed: tuple[Observed, ...] = ()
    """Machines of the attempt in recent listings."""
    missing_once: bool = False
    """True when only the latest listing omits a machine. That machine may exist in addition to the listed ones."""
    has_heartbeats: bool = False
    """True when the agents of all machines have sent heartbeats, at any time, and this process awaits no answer of
    create.
    """
    store_ok: bool = True
    """False when heartbeats have been readable for too short a time to show a live agent; its state is then unknown."""
    dead_s: float | None = None
    """Seconds since this process first knew that the launcher is dead; None: the launcher may be alive."""
    absent: bool = False
    """True when a listing after the launcher's death proves that no machine exists."""
    final: Final | None = None
    """The agent's final report, which is read once the machines are absent; None: there is none."""
    is_report_unreadable: bool = False
    """True when the machines are absent and the blob store could read neither the final report nor later attempts."""
    is_superseded: bool = False
    """True when a later attempt of the job was bought: this one has ended, but a restored backup lacks its end."""


def judge_launching(attempt: Attempt, observation: LaunchObservation, caps: Caps, now: datetime) -> AttemptEvent | None:
    """Return the event that follows from a poll; None: wait.

    ABSENT means that no machine exists and none will appear, so create may be called again. If the launcher starts the
    agent (`caps.agent_start_s`), a listed machine is adopted only with a heartbeat. The launcher may have died before
    it started the agent, and such a machine bills and never trains.
    """
    complete = len(observation.listed) >= attempt.line.nodes
    handles = {machine.handle.id for machine in observation.listed if machine.state is not InstanceState.GONE}
    if len(handles) > attempt.line.nodes:
        return AttemptEvent.MISMATCH  # each extra machine bills
    adoptable = complete and not observation.missing_once
    if adoptable and caps.agent_start_s is None:
        return AttemptEvent.CREATED
    if any(machine.state in TAKEN_AWAY for machine in observation.listed):
        return AttemptEvent.GONE
    if mismatch_message(attempt.line.offer, observation.listed):
        return AttemptEvent.MISMATCH
    if observation.has_heartbeats and adoptable:
        return AttemptEvent.CREATED
    if fault_message(observation.listed):
        return AttemptEvent.SETUP_FAILED
    is_late = (now - (attempt.create_sent_at or now)).total_seconds() > caps.boot_deadline_s
    if observation.absent and observation.dead_s is not None:
        return _judge_absent(attempt, observation, is_late=is_late)
    # A machine that exists may train without a readable heartbeat, and a first listing may omit an existing machine.
    if is_late and (observation.store_ok or not complete) and not _may_be_left_out(observation, caps):
        return AttemptEvent.DEADLINE
    waited = (
        observation.store_ok and observation.dead_s is not None and observation.dead_s > (caps.agent_start_s or 0.0)
    )
    return AttemptEvent.SETUP_FAILED if observation.listed and waited else None


def _judge_absent(attempt: Attempt, observation: LaunchObservation, *, is_late: bool) -> AttemptEvent | None:
    if observation.final is not None:  # every machine ended while no broker ran, or after the backup
        return AttemptEvent.FINAL
    if attempt.handles or observation.is_superseded:
        return AttemptEvent.GONE  # a machine that existed and is absent was taken away
    if is_late:
        return AttemptEvent.DEADLINE
    return None if observation.is_report_unreadable else AttemptEvent.ABSENT


def _may_be_left_out(observation: LaunchObservation, caps: Caps) -> bool:
    """Return True if a listing may omit a machine that trains.

    A restored backup may return an old row of an attempt that trains already. If a launcher starts the agents, a
    machine without a heartbeat by the deadline does not train.
    """
    unproven = observation.dead_s is not None and not observation.listed
    trains = observation.has_heartbeats or not observation.store_ok or caps.agent_start_s is None
    return unproven or (observation.missing_once and trains)


def outdated(bought: Offer, latest: Offer | None, seen_at: datetime | None, price_rise: Decimal) -> str | None:
    """Return why an offer may not be bought as quoted, in one line; None: price and availability still hold.

    `latest`, `seen_at`: the current offer and the time of its provider's newest offer, both in this process. The broker
    that quoted may have newer offers. `price_rise`: the share by which the price may have risen.
    """
    if seen_at is not None and seen_at <= bought.seen_at:
        return None
    if latest is None:
        return f"{bought.id} is no longer offered"
    if latest.available is False:
        return f"{bought.id} has been sold out since it was quoted"
    if latest.usd_per_hour > bought.usd_per_hour * (1 + price_rise):
        change = f"from {format_usd(bought.usd_per_hour)}/h to {format_usd(latest.usd_per_hour)}/h"
        return f"the price of {bought.id} went {change} since it was quoted, more than {price_rise:.1%}"
    return None
