"""Finds orphans: machines with our name prefix that belong to no live attempt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from broker.domain.ids import AttemptId, Installation, attempt_of
from broker.domain.instance import InstanceState, Observed
from broker.domain.job import Attempt, AttemptState


@dataclass(frozen=True, kw_only=True)
class Orphan:
    """A machine without a live attempt."""

    observed: Observed
    id: AttemptId
    """The attempt that the machine's name states."""
    attempt: Attempt | None
    """The attempt whose job is charged for the machine; None: the database has no such attempt."""
    why: str
    born: datetime | None
    """Creation time of the first machine with its name, by the cloud's clock; None: the cloud does not report it."""


def orphans(
    installation: Installation, listed: Sequence[Observed], attempts: Mapping[AttemptId, Attempt]
) -> tuple[Orphan, ...]:
    """Return our machines without a live attempt, and extra machines of live attempts. Foreign names are ignored."""
    orphaned = []
    for machine in listed:
        attempt_id = attempt_of(installation, machine.handle.name)
        if attempt_id is None or machine.state is InstanceState.GONE:
            continue
        attempt = attempts.get(attempt_id)
        why = _orphan_message(attempt, machine)
        if why is not None:
            born_at = _first_created_at(listed, machine)
            orphaned.append(Orphan(observed=machine, id=attempt_id, attempt=attempt, why=why, born=born_at))
    return tuple(orphaned)


def _orphan_message(attempt: Attempt | None, machine: Observed) -> str | None:
    """Return why the machine is an orphan; None: it belongs to a live attempt."""
    if attempt is None:
        return "no attempt of ours has this name"
    if not attempt.live:
        return "its attempt has ended"
    return None if _belongs(attempt, machine) else "a second machine under one name"


def _first_created_at(listed: Sequence[Observed], machine: Observed) -> datetime | None:
    """Return the earliest creation time of the machines with this name; None: a creation time is unknown.

    The earliest time counts, because the charge of one machine covers all machines of its attempt.
    """
    times = [
        other.created_at
        for other in listed
        if other.handle.name == machine.handle.name and other.state is not InstanceState.GONE
    ]
    known_times = [at for at in times if at is not None]
    return min(known_times) if len(known_times) == len(times) else None


def spared_message(orphan: Orphan, *, report_only: bool, was_bought: bool | None) -> str | None:
    """Return why the sweep only reports the orphan; None: it is destroyed.

    A row is committed before its machine is created. A bought machine without a row therefore proves that the database
    was restored from an older backup. `was_bought`: its spec exists in the blob store; None: the store cannot be read.
    """
    if report_only:
        return "only reported: the database is new to this home"
    if orphan.attempt is not None:
        return None
    if was_bought is None:
        return "only reported: the blob store, which records its buyer, cannot be read"
    if was_bought:
        return "only reported: this installation bought it, so the database is older than the machine (a backup?)"
    return None


def _belongs(attempt: Attempt, machine: Observed) -> bool:
    """Return True if the machine belongs to the attempt.

    During a launch machines appear one by one, so not all are recorded yet.
    """
    recorded = {handle.id for handle in attempt.handles}
    return attempt.state is AttemptState.LAUNCHING or not recorded or machine.handle.id in recorded
