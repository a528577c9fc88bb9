"""Attempts without a row: they were bought after the backup from which this database was restored.

An attempt's id follows from its job and its number. A number must not be issued twice, because its machine, spec and
final report may exist. The job's attempt count therefore skips such numbers.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache

from broker.domain.ids import AttemptId, JobId, attempt_id
from broker.domain.job import Job, Reason
from trainer.contract.documents import Desired, Final

AHEAD = 16
"""Number of attempt numbers to check after a job's latest. Unsent attempts leave no trace, but later attempts may."""
JOBS = 512
"""Number of jobs whose possible attempts are cached. One decision reads them three times; a round decides 200 jobs."""
_ENDING_REASONS = frozenset({Reason.STOPPED, Reason.CAPPED})
"""Drain reasons that end the job."""


def possible_attempts(job: Job) -> Mapping[AttemptId, int]:
    """Return the ids of the next attempts of a job, with their numbers in order."""
    return _attempts_after(job.id, job.attempts)


@lru_cache(maxsize=JOBS)
def _attempts_after(job: JobId, number: int) -> Mapping[AttemptId, int]:
    return {attempt_id(job, later): later for later in range(number + 1, number + 1 + AHEAD)}


def attempts_without_row(job: Job, checkpoints: Iterable[str]) -> tuple[str, ...]:
    """Return attempts that have keys below the job's checkpoints but no number issued by this database."""
    issued = {attempt_id(job.id, number) for number in range(1, job.attempts + 1)}
    return tuple(sorted({key.split("/")[2] for key in checkpoints} - issued))


def drain_reason(desired: Desired) -> Reason | None:
    """Return the reason of a drain request if it ends the job; None: the job continues."""
    return next((reason for reason in _ENDING_REASONS if reason.value == desired.reason), None)


def still_running_message(number: int, machine: str, final: Final | None) -> str:
    """Return why a job waits for the machine of an attempt without a row, and what a user can do, in one line."""
    now = "may still train" if final is None else f"has ended ({final.outcome.value})"
    wait = "wait until it is gone, or end it" if final is None else "end it"
    return (
        f"attempt {number} was bought after the backup that this database comes from and {now}: {machine} exists and "
        f"bills; {wait}: gpubroker sweep --once --destroy --spared"
    )


def unproven_message(number: int, silent: Iterable[str]) -> str:
    """Return why a job waits until the clouds answer whether an attempt without a row has machines."""
    clouds = ", ".join(sorted(silent))
    status = f"{clouds} did not answer; see gpubroker doctor" if clouds else "the clouds are asked"
    return (
        f"attempt {number} was bought after the backup that this database comes from; does its machine exist? {status}"
    )
