"""Finds checkpoints of a running job's ended attempts that no attempt will resume from.

A trainer deletes only its own attempt's checkpoints, so the broker deletes those of earlier attempts. An earlier
checkpoint stays until the current attempt has committed `checkpoint.keep` checkpoints at that step or later. `keep` is
at least two, so that a damaged latest checkpoint has a predecessor. Milestones, checkpoints for the guard's rollback
and the latest complete token caches stay.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from broker.domain.ids import AttemptId
from broker.domain.job import RESTING_JOB_STATES, Attempt, Job
from broker.lifecycle.recovery import furthest_first
from broker.lifecycle.retention import latest_token_caches, manifests_first
from trainer.contract import object_keys as keys
from trainer.contract.guard import rollback_manifests
from trainer.contract.object_keys import step_of
from trainer.contract.save_interval import milestones

UNCOMMITTED_S = 3600.0
"""Seconds after an attempt's end for which folders without a manifest are kept. A process that outlives its attempt
must not commit a half-deleted checkpoint.
"""


def superseded(job: Job, attempts: Sequence[Attempt], checkpoints: Iterable[str], now: datetime) -> tuple[str, ...]:
    """Return the keys below the job's checkpoints that are due for deletion, in the order of deletion.

    `attempts`: all attempts of the job, in the order of their numbers. `retention.leftovers` handles jobs that have
    ended.
    """
    if job.state in RESTING_JOB_STATES:
        return ()
    all_keys = [*checkpoints]
    long_over = {
        attempt.id
        for attempt in attempts
        if attempt.ended_at and now - attempt.ended_at > timedelta(seconds=UNCOMMITTED_S)
    }
    return manifests_first(
        [*_checkpoints(job, attempts, all_keys, long_over), *_token_caches(attempts, all_keys, long_over)]
    )


def _checkpoints(
    job: Job, attempts: Sequence[Attempt], all_keys: Sequence[str], long_over: set[AttemptId]
) -> list[str]:
    """Return keys of earlier attempts' checkpoints that the current attempt's own checkpoints replace."""
    if not attempts or not attempts[-1].live:
        return []
    pairs = [(key, _manifest(key)) for key in all_keys]
    committed = furthest_first([key for key, manifest in pairs if key == manifest])
    own_manifests = [manifest for manifest in committed if _attempt(manifest) == attempts[-1].id]
    if len(own_manifests) < job.spec.checkpoint.keep:
        return []
    floor = step_of(own_manifests[job.spec.checkpoint.keep - 1])
    over = {attempt.id for attempt in attempts if not attempt.live}

    def is_doomed(manifest: str) -> bool:
        owners = over if manifest in committed_steps else long_over
        return _attempt(manifest) in owners and step_of(manifest) <= floor

    committed_steps = set(committed)
    doomed = set(filter(is_doomed, furthest_first([*{manifest for _, manifest in pairs}])))
    guard = job.spec.train.guard if job.spec.train else None
    doomed -= milestones(committed, job.spec.checkpoint.keep_every) | rollback_manifests(committed, floor, guard)
    return [key for key, manifest in pairs if manifest in doomed]


def _token_caches(attempts: Sequence[Attempt], all_keys: Sequence[str], long_over: set[AttemptId]) -> list[str]:
    """Return keys of incomplete and repeated token caches, independent of the current attempt's progress."""
    stay = tuple(manifest.removesuffix(keys.MANIFEST) for manifest in latest_token_caches(attempts, all_keys))
    rows = filter(keys.is_in_token_cache, all_keys)
    return [key for key in rows if _attempt(key) in long_over and not key.startswith(stay)]


def _manifest(key: str) -> str:
    """Return the manifest key of the checkpoint that a key belongs to."""
    return "/".join([*key.split("/")[:4], keys.MANIFEST])


def _attempt(key: str) -> AttemptId:
    return AttemptId(key.split("/")[2])
