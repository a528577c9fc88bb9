"""Checkpoints of a running job's dead attempts: which of them nobody will go on from any more.

A trainer deletes below its own attempt only, so what an earlier one left is the broker's to collect. What the current
attempt resumed from must stay until that has committed enough of its own, each at least as far: two, so that a torn
newest one has a successor, and as many as `checkpoint.keep` where that is more. Milestones stay,
and so does what the guard may go back to. The newest tokenised rows that are whole stay for the attempts to come.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from broker.domain.ids import AttemptId
from broker.domain.job import RESTING_JOB_STATES, Attempt, Job
from broker.lifecycle.recovery import furthest_first
from broker.lifecycle.retention import manifests_first, newest_rows
from trainer.contract import object_keys as keys
from trainer.contract.guard import way_back
from trainer.contract.milestones import milestones
from trainer.contract.object_keys import step_of

UNCOMMITTED_S = 3600.0
"""After its attempt's end a folder without a manifest is left alone for so long: whoever outlived its attempt against
all proof must not commit what is half deleted."""


def superseded(job: Job, attempts: Sequence[Attempt], checkpoints: Iterable[str], now: datetime) -> tuple[str, ...]:
    """Of the keys below the job's checkpoints those to delete, in this order. `attempts`: all of
    the job's, in theirs.

    A job at rest is `retention.leftovers`' business.
    """
    if job.state in RESTING_JOB_STATES:
        return ()
    found = [*checkpoints]
    long_over = {one.id for one in attempts if one.ended_at and now - one.ended_at > timedelta(seconds=UNCOMMITTED_S)}
    return manifests_first([*_checkpoints(job, attempts, found, long_over), *_rows(attempts, found, long_over)])


def _checkpoints(job: Job, attempts: Sequence[Attempt], every: Sequence[str], long_over: set[AttemptId]) -> list[str]:
    """What the current attempt has passed."""
    if not attempts or not attempts[-1].live:
        return []
    found = [(key, _manifest(key)) for key in every]
    committed = furthest_first([key for key, manifest in found if key == manifest])
    own = [manifest for manifest in committed if _attempt(manifest) == attempts[-1].id]
    if len(own) < job.spec.checkpoint.keep:
        return []
    floor = step_of(own[job.spec.checkpoint.keep - 1])
    over = {one.id for one in attempts if not one.live}

    def is_doomed(manifest: str) -> bool:
        owners = over if manifest in known else long_over
        return _attempt(manifest) in owners and step_of(manifest) <= floor

    known = set(committed)
    doomed = set(filter(is_doomed, furthest_first([*{manifest for _, manifest in found}])))
    guard = job.spec.train.guard if job.spec.train else None
    doomed -= milestones(committed, job.spec.checkpoint.keep_every) | way_back(committed, floor, guard)
    return [key for key, manifest in found if manifest in doomed]


def _rows(attempts: Sequence[Attempt], found: Sequence[str], long_over: set[AttemptId]) -> list[str]:
    """Torn ones, and whole ones that another attempt has put again since: however far the current attempt has come."""
    stay = tuple(manifest.removesuffix(keys.MANIFEST) for manifest in newest_rows(attempts, found))
    rows = filter(keys.is_of_rows, found)
    return [key for key in rows if _attempt(key) in long_over and not key.startswith(stay)]


def _manifest(key: str) -> str:
    """Of the checkpoint that a key is a part of, if it is one's."""
    return "/".join([*key.split("/")[:4], keys.MANIFEST])


def _attempt(key: str) -> AttemptId:
    return AttemptId(key.split("/")[2])
