"""Machines that stood without any broker: when they had ended themselves at the latest."""

from datetime import datetime, timedelta

from broker.controllers.base.context import ControllerContext
from broker.controllers.observation.inventory import Inventory
from broker.domain.instance import SELF_STOP_S
from broker.domain.job import Attempt, Job


def self_stopped_by(context: ControllerContext, inventory: Inventory, attempt: Attempt, job: Job) -> datetime | None:
    """Of one that is not listed any more: all brokers may have been away when it went, and it was not charged then.

    Its agent, which has beaten, waits for the lease to move, saves, and waits to be destroyed: since the last charge,
    or since this broker was last shown that it stands. What was never charged was asked for right before they left,
    and that it has booted may be known only since they are back. A first beat that was heard later had come by then,
    and within the time for a boot. None: it ends nothing.
    """
    caps, limits = context.provider_of(attempt).caps, context.limits
    stood = attempt.charged_to or attempt.create_sent_at
    if caps.self_stop == "none" or not limits.deadman_s or attempt.first_beat_at is None or stood is None:
        return None
    stood = min(stood + timedelta(seconds=caps.boot_deadline_s), max(stood, attempt.first_beat_at))
    # A tick that owes no new quantum moves nothing, and the lease may have been touched right after it.
    charged_s = attempt.line.offer.billing_quantum_s + context.rhythm.billing_s + context.rhythm.deadman_s
    alone_s = limits.deadman_s + limits.drain_s + SELF_STOP_S + job.spec.keep_on_failure
    return max(stood, inventory.last_shown(attempt) or stood) + timedelta(seconds=charged_s + alone_s)
