"""Checkpoints of a running job's dead attempts: which of them nobody will go on from any more.

A trainer deletes below its own attempt only, so what an earlier one left is the broker's to collect. What the current
attempt resumed from must stay until that has committed enough of its own, each at least as far: two, so that a torn
newest one has a successor, and as many as `checkpoint.keep` where that is more. Milestones stay,
and so does the furthest one that the guard could go back to.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from broker.decide.recovery import furthest_first
from broker.decide.retention import manifests_first
from broker.domain.job import RESTING_JOB_STATES, Attempt, Job
from trainer.contract import keys
from trainer.contract.keys import step_of
from trainer.contract.milestones import milestones

UNCOMMITTED_S = 3600.0
"""After its attempt's end a folder without a manifest is left alone for so long: whoever outlived its attempt against
all proof must not commit what is half deleted."""


def superseded(job: Job, attempts: Sequence[Attempt], checkpoints: Iterable[str], now: datetime) -> tuple[str, ...]:
    """Of the keys below the job's checkpoints those to delete, in this order. `attempts`: all of
    the job's, in theirs.

    A job at rest is `retention.leftovers`' business.
    """
    if job.state in RESTING_JOB_STATES or not attempts or not attempts[-1].live:
        return ()
    found = [(key, _manifest(key)) for key in checkpoints]
    committed = furthest_first([key for key, manifest in found if key == manifest])
    own = [manifest for manifest in committed if _attempt(manifest) == attempts[-1].id]
    if len(own) < job.spec.checkpoint.keep:
        return ()
    floor = step_of(own[job.spec.checkpoint.keep - 1])
    over = {one.id for one in attempts if not one.live}
    long_over = {one.id for one in attempts if one.ended_at and now - one.ended_at > timedelta(seconds=UNCOMMITTED_S)}

    def is_doomed(manifest: str) -> bool:
        owners = over if manifest in known else long_over
        return _attempt(manifest) in owners and step_of(manifest) <= floor

    known = set(committed)
    doomed = set(filter(is_doomed, furthest_first([*{manifest for _, manifest in found}])))
    doomed -= milestones(committed, job.spec.checkpoint.keep_every) | _behind(job, committed, floor)
    return manifests_first(key for key, manifest in found if manifest in doomed)


def _behind(job: Job, committed: Sequence[str], floor: int) -> set[str]:
    """What a training that goes back from behind `floor` begins with: `guard.back_steps` before its first bad step."""
    guard = job.spec.train.guard if job.spec.train else None
    if guard is None or not guard.rollbacks:
        return set()
    reach = floor - guard.skip - guard.back_steps
    return set([manifest for manifest in committed if step_of(manifest) <= reach][:1])


def _manifest(key: str) -> str:
    """Of the checkpoint that a key is a part of, if it is one's."""
    return "/".join([*key.split("/")[:4], keys.MANIFEST])


def _attempt(manifest: str) -> str:
    return manifest.split("/")[2]
