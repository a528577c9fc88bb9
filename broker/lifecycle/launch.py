"""What a look at a launching attempt amounts to, and whether what was quoted may still be bought."""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from broker.domain.instance import Caps, InstanceState, Observed
from broker.domain.job import Attempt
from broker.domain.money import show
from broker.domain.offer import Offer
from broker.lifecycle.liveness import TAKEN_AWAY, fault, mismatch
from broker.lifecycle.state_machine import AttemptEvent
from trainer.contract.documents import Final


@dataclass(frozen=True, kw_only=True)
class LaunchLook:
    """All that one look showed while create has not answered."""

    seen: tuple[Observed, ...] = ()
    omits: bool = False
    """A machine is left out by the last listing alone: it may stand beside those that are shown."""
    beating: bool = False
    """The agents of all machines have beaten, however long ago, and no answer of create is on its way to this
    process."""
    store_ok: bool = True
    """The beats can be read, for long enough that one would show; without them nothing is known of an agent."""
    dead_s: float | None = None
    """Seconds since this process first knew the launcher dead; None: it may live."""
    absent: bool = False
    """Proven, since the launcher's death."""
    final: Final | None = None
    """Its agent's last word; asked for once it is absent."""
    unread: bool = False
    """It is absent, and the blob store tells neither that nor what follows."""
    followed: bool = False
    """A later attempt of the job was bought, so this one's end is missing in a database that a backup brought back."""


def judge_launching(attempt: Attempt, look: LaunchLook, caps: Caps, now: datetime) -> AttemptEvent | None:
    """The event that a look amounts to; ABSENT: nothing stands there and nothing will, so create may be called again.

    None: wait. Where the launcher starts the agent (`caps.agent_start_s`), a machine alone is not adopted: a launcher
    that dies in between leaves one that bills and never trains.
    """
    complete = len(look.seen) >= attempt.line.nodes
    shown = {one.handle.id for one in look.seen if one.state is not InstanceState.GONE}
    if len(shown) > attempt.line.nodes:
        return AttemptEvent.MISMATCH  # each of them bills
    adoptable = complete and not look.omits
    if adoptable and caps.agent_start_s is None:
        return AttemptEvent.CREATED
    if any(machine.state in TAKEN_AWAY for machine in look.seen):
        return AttemptEvent.GONE
    if mismatch(attempt.line.offer, look.seen):
        return AttemptEvent.MISMATCH
    if look.beating and adoptable:
        return AttemptEvent.CREATED
    if fault(look.seen):
        return AttemptEvent.SETUP_FAILED
    late = (now - (attempt.create_sent_at or now)).total_seconds() > caps.boot_deadline_s
    if look.absent and look.dead_s is not None:
        return _judge_absent(attempt, look, late=late)
    # What stands there may work, and cannot tell; and what a first listing leaves out may stand.
    if late and (look.store_ok or not complete) and not _may_be_left_out(look, caps):
        return AttemptEvent.DEADLINE
    waited = look.store_ok and look.dead_s is not None and look.dead_s > (caps.agent_start_s or 0.0)
    return AttemptEvent.SETUP_FAILED if look.seen and waited else None


def _judge_absent(attempt: Attempt, look: LaunchLook, *, late: bool) -> AttemptEvent | None:
    if look.final is not None:  # all of it went by while no broker ran, or after the backup
        return AttemptEvent.FINAL
    if attempt.handles or look.followed:
        return AttemptEvent.GONE  # what was there and is not any more was taken away
    if late:
        return AttemptEvent.DEADLINE
    return None if look.unread else AttemptEvent.ABSENT


def _may_be_left_out(look: LaunchLook, caps: Caps) -> bool:
    """What trains since may be what a listing leaves out: a row may be much older than the process that reads it (a
    backup's). Where a launcher starts the agents, what has not beaten by the deadline does not train.
    """
    unproven = look.dead_s is not None and not look.seen
    trains = look.beating or not look.store_ok or caps.agent_start_s is None
    return unproven or (look.omits and trains)


def outdated(bought: Offer, latest: Offer | None, seen_at: datetime | None, price_rise: Decimal) -> str | None:
    """Why an offer is not bought as it was quoted, in one line; None: it still stands, or has become cheaper.

    `latest`, `seen_at`: the offer and its provider's newest answer, as this process knows them; another broker, which
    quoted, may know more. `price_rise`: share by which it may have become dearer; more makes it another offer.
    """
    if seen_at is not None and seen_at <= bought.seen_at:
        return None
    if latest is None:
        return f"{bought.id} is no longer offered"
    if latest.available is False:
        return f"{bought.id} has been sold out since it was quoted"
    if latest.usd_per_hour > bought.usd_per_hour * (1 + price_rise):
        was, now = show(bought.usd_per_hour), show(latest.usd_per_hour)
        return f"the price of {bought.id} went from {was}/h to {now}/h since it was quoted, more than {price_rise:.1%}"
    return None
