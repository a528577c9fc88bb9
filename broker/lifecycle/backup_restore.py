"""Attempts that were made and have no row: the database is older than the world, since a backup was restored.

An attempt's id follows from its job and its number, so a number must never be issued again: its machine, its spec and
its last word are there already. Once a job's count has gone past such numbers, they are accounted for.
"""

from collections.abc import Iterable, Mapping

from broker.domain.ids import AttemptId, attempt_id
from broker.domain.job import Job, Reason
from trainer.contract.documents import Desired, Final

AHEAD = 16
"""Numbers after a job's last that are looked at: one that was never sent leaves no trace, and those after it may."""
_BY_BROKER = frozenset({Reason.STOPPED, Reason.CAPPED})
"""What a drain can have been for that ends its job."""


def possible_attempts(job: Job) -> Mapping[AttemptId, int]:
    """The next attempts of a job, with their numbers in order."""
    return {attempt_id(job.id, number): number for number in range(job.attempts + 1, job.attempts + 1 + AHEAD)}


def unknown(job: Job, checkpoints: Iterable[str]) -> tuple[str, ...]:
    """Attempts that have keys below the job's checkpoints, and whose numbers were never issued as far as it knows."""
    issued = {attempt_id(job.id, number) for number in range(1, job.attempts + 1)}
    return tuple(sorted({key.split("/")[2] for key in checkpoints} - issued))


def drained_for(desired: Desired) -> Reason | None:
    """What a drain was for that the database does not know of, as the broker told the machine; None: it does not end
    the job.
    """
    return next((reason for reason in _BY_BROKER if reason.value == desired.reason), None)


def still_running_message(number: int, machine: str, final: Final | None) -> str:
    """Why a job waits for the machine of such an attempt, and what a person can do, in one line."""
    now = "may train on" if final is None else f"has ended ({final.outcome.value})"
    wait = "wait until it is gone, or end it" if final is None else "end it"
    return (
        f"attempt {number} was bought after the backup that this database comes from and {now}: {machine} stands and "
        f"bills; {wait}: gpubroker sweep --once --destroy --spared"
    )


def not_proven(number: int, silent: Iterable[str]) -> str:
    """Why a job waits while nobody can tell whether such an attempt has machines."""
    clouds = ", ".join(sorted(silent))
    told = f"{clouds} did not answer; see gpubroker doctor" if clouds else "the clouds are asked"
    return f"attempt {number} was bought after the backup that this database comes from; does its machine stand? {told}"
