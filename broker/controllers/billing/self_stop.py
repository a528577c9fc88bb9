"""Latest time at which a machine that ran without a broker shut itself down (dead-man's switch)."""

from datetime import datetime, timedelta

from broker.controllers.base.context import ControllerContext
from broker.controllers.observation.inventory import Inventory
from broker.domain.instance import SELF_STOP_S
from broker.domain.job import Attempt, Job


def self_stopped_by(context: ControllerContext, inventory: Inventory, attempt: Attempt, job: Job) -> datetime | None:
    """Return the latest possible end of a machine that vanished while no broker was running; None: unbounded.

    Its agent has sent a heartbeat. It waits for the broker's lease to move, saves, and waits to be destroyed. That time
    counts from the last charge, or from the last listing that showed the machine. A machine that was never charged
    counts from its create and the time for a boot, because its boot may have been recorded only later.
    """
    caps, limits = context.provider_of(attempt).caps, context.limits
    known_at = attempt.charged_to or attempt.create_sent_at
    if caps.self_stop == "none" or not limits.deadman_s or attempt.first_beat_at is None or known_at is None:
        return None
    known_at = min(known_at + timedelta(seconds=caps.boot_deadline_s), max(known_at, attempt.first_beat_at))
    # A round without a new quantum moves no charge, and the lease may have been renewed right after it.
    charged_s = attempt.line.offer.billing_quantum_s + context.rhythm.billing_s + context.rhythm.deadman_s
    alone_s = limits.deadman_s + limits.drain_s + SELF_STOP_S + job.spec.keep_on_failure
    return max(known_at, inventory.last_listed_at(attempt) or known_at) + timedelta(seconds=charged_s + alone_s)
