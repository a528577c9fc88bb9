"""Which machines under our prefix nobody answers for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from broker.domain.ids import AttemptId, Installation, attempt_of
from broker.domain.instance import InstanceState, Observed
from broker.domain.job import Attempt, AttemptState


@dataclass(frozen=True, kw_only=True)
class Orphan:
    observed: Observed
    id: AttemptId
    """That its name says."""
    attempt: Attempt | None
    """The ended attempt that it belongs to, if there is one: the time is charged to its job."""
    why: str
    born: datetime | None
    """When the first machine under its name came to stand, by the cloud's clock; None: the cloud does not say."""


def orphans(
    installation: Installation, seen: Sequence[Observed], attempts: Mapping[AttemptId, Attempt]
) -> tuple[Orphan, ...]:
    """Our machines without a live attempt, or beside the recorded machine of one; foreign names never."""
    found = []
    for machine in seen:
        attempt_id = attempt_of(installation, machine.handle.name)
        if attempt_id is None or machine.state is InstanceState.GONE:
            continue
        attempt = attempts.get(attempt_id)
        why = _unanswered(attempt, machine)
        if why is not None:
            born = _born(seen, machine)
            found.append(Orphan(observed=machine, id=attempt_id, attempt=attempt, why=why, born=born))
    return tuple(found)


def _unanswered(attempt: Attempt | None, machine: Observed) -> str | None:
    """Why nobody answers for it; None: its attempt does."""
    if attempt is None:
        return "no attempt of ours has this name"
    if not attempt.live:
        return "its attempt has ended"
    return None if _known(attempt, machine) else "a second machine under one name"


def _born(seen: Sequence[Observed], machine: Observed) -> datetime | None:
    """Of all that stand under its name, each of which is charged for as if all of the attempt's machines stood."""
    times = [o.created_at for o in seen if o.handle.name == machine.handle.name and o.state is not InstanceState.GONE]
    known = [at for at in times if at is not None]
    return min(known) if len(known) == len(times) else None


def spared(orphan: Orphan, *, report_only: bool, bought: bool | None) -> str | None:
    """Why the sweep only reports it; None: it is destroyed.

    A row is committed before its machine is created, so a machine that was bought (`bought`: its spec lies in the blob
    store; None: that cannot be read) and has no row is proof of a database older than the machine: a backup restored.
    """
    if report_only:
        return "only reported: the database is new to this home"
    if orphan.attempt is not None:
        return None
    if bought is None:
        return "only reported: the blob store, which would tell who bought it, cannot be read"
    if bought:
        return "only reported: this installation bought it, so the database is older than the machine (a backup?)"
    return None


def _known(attempt: Attempt, machine: Observed) -> bool:
    """While a launch goes on its machines appear one by one; the recorded ones need not be all."""
    recorded = {handle.id for handle in attempt.handles}
    return attempt.state is AttemptState.LAUNCHING or not recorded or machine.handle.id in recorded
