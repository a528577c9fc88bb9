"""Rules for checkpoints, and for machines whose brokers are gone: invariants 9, 10 and 14."""

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from broker.domain.ids import AttemptId, JobId
from broker.domain.job import RESTING_JOB_STATES
from broker.lifecycle.recovery import furthest_first
from tests.sim.disk import WEIGHTS, weights
from tests.sim.faults import lasted_s
from trainer.contract import object_keys as keys
from trainer.contract.documents import AttemptSpec, Manifest
from trainer.contract.object_keys import step_of

if TYPE_CHECKING:
    from tests.sim.world import World

SLACK_S = 60.0
"""Allowed seconds for a heartbeat, a poll and the last save, in addition to the time of a drain."""
ENOUGH = 2
"""Commits of a later attempt after which no resume uses the checkpoints of an ended one."""


def _attempt(key: str) -> str:
    return key.split("/")[2]


class Keeping:
    def __init__(self, world: "World") -> None:
        self._world = world
        self.rotten: set[JobId] = set()
        """Jobs with a damaged checkpoint."""

    def saved(self, job_id: JobId, but: str = "") -> int:
        """Return the furthest saved step. `but`: key to ignore, because a surviving trainer may save a step twice."""
        furthest = furthest_first([key for key in self._world.objects.below(keys.checkpoints(job_id)) if key != but])
        return step_of(furthest[0]) if furthest else 0

    def before_manifest(self, key: str, data: bytes) -> None:
        """Check that all files of a checkpoint exist before its manifest, and equal those of an uninterrupted
        training.
        """
        manifest = Manifest.model_validate_json(data)
        folder, objects = keys.files_prefix(key), self._world.objects.data
        for file in manifest.files:
            found = objects.get(folder + file.path)
            if found is None or hashlib.sha256(found[0]).hexdigest() != file.sha256:
                self._world.fail("manifest_last", f"{key} was written, and {file.path} is not what it says")
                return
        there = objects.get(folder + WEIGHTS)
        if there is None or there[0] != weights(self._world.lineage(manifest.job), manifest.step):
            self._world.fail("resume_is_exact", f"{key} holds {there and there[0].decode()!r}")

    def loaded(self, spec: AttemptSpec, key: str, manifest: Manifest, disk: Mapping[str, bytes]) -> None:
        """Record that a machine resumes from the files on its disk."""
        job = JobId(spec.job)
        if not self.may_start_from(job, key):
            self._world.fail("own_checkpoint", f"job {job} loaded {key}")
        self._no_older(spec, key)
        for file in manifest.files:
            found = disk.get(file.path)
            if found is None or hashlib.sha256(found).hexdigest() != file.sha256:
                self._world.fail("torn_never_loaded", f"{key} was loaded, and {file.path} is not what it says")

    def _no_older(self, spec: AttemptSpec, key: str) -> None:
        """Check that the loaded checkpoint of another job is at least as far as the furthest one at the purchase."""
        origin = JobId(key.split("/")[1])
        named = [other for other in spec.resume_from if other.startswith(keys.checkpoints(origin))]
        if origin != spec.job and origin not in self.rotten and step_of(key) < step_of(named[0]):
            self._world.fail("resume_furthest", f"{spec.attempt} loaded {key}, and {named[0]} was named")

    def may_start_from(self, job: JobId, key: str) -> bool:
        """Return True for a job's own checkpoints, and those of the job that its spec names."""
        own = self._world.backups.job(job)
        allowed = (job, None if own is None else own.spec.origin)
        return key.startswith(tuple(keys.checkpoints(one) for one in allowed if one is not None))

    def before_delete(self, key: str, *, by_broker: bool) -> None:
        if not keys.is_manifest(key):
            return
        job_id = JobId(key.split("/")[1])
        row = self._world.state.jobs.get(job_id)
        rests = row is not None and row.value.state in RESTING_JOB_STATES
        needed = by_broker and not rests and not self._is_superseded(job_id, key)
        if needed or step_of(key) > self.saved(job_id, but=key):
            self._world.fail("good_checkpoint_kept", f"{key} was deleted")
        if by_broker and (heir := self._named_by(job_id, key)) is not None:
            self._world.fail("good_checkpoint_kept", f"{key} was deleted, and {heir} starts from it")

    def _named_by(self, job_id: JobId, key: str) -> JobId | None:
        """Return a live job that starts from this job's checkpoint `key`, or None."""
        state = self._world.state
        for own in self._world.jobs:
            job = state.jobs[own].value
            if job.spec.origin != job_id or job.state in RESTING_JOB_STATES:
                continue
            if any(key in state.attempts[i].value.resume_from for i in state.of_job[own]):
                return own
        return None

    def _is_superseded(self, job_id: JobId, key: str) -> bool:
        """Return True if the attempt has ended and a later one has committed two checkpoints that are at least as
        far.
        """
        state = self._world.state
        attempts = [state.attempts[i].value for i in state.of_job[job_id]]
        furthest = furthest_first(self._world.objects.below(keys.checkpoints(job_id)))
        number = {attempt.id: attempt.number for attempt in attempts if not attempt.live}.get(AttemptId(_attempt(key)))
        if number is None:
            return False
        later = [attempt.id for attempt in attempts if attempt.number > number]
        beyond = [_attempt(other) for other in furthest if step_of(other) >= step_of(key)]
        return any(beyond.count(attempt) >= ENOUGH for attempt in later)

    def tick(self) -> None:
        """Check that machines which read an unchanged lease for too long have saved and stopped."""
        world, now = self._world, self._world.loop.time()
        limit_s = world.limits.deadman_s + world.limits.drain_s + SLACK_S
        if now - world.touched_at <= limit_s:
            return
        for one in world.body.training():
            since = max(world.touched_at, one.trains_from)
            if now - since - lasted_s(world.plan, "blobs.down_for_all", since, now) > limit_s:
                self._world.fail("broker_gone_stops", f"{one.machine.name} trains on, {now - since:.0f} s without one")
