"""Wrong rules and functions, each in place of one of the product; `mutants.py` names the invariants that they break."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from unittest.mock import patch

from broker.controllers.monitoring import dead_man_switch as deadman
from broker.controllers.observation.heartbeats import HeartbeatReader
from broker.controllers.provisioning import (
    boot_spec as boot,
)
from broker.controllers.provisioning import (
    creates_in_flight as launchers,
)
from broker.controllers.provisioning import (
    launch,
    placement,
)
from broker.controllers.provisioning import (
    launcher_completion as through,
)
from broker.controllers.provisioning.attempt_documents import attempt_spec
from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import Installation, JobId, attempt_id, instance_name
from broker.domain.instance import InstanceState, Liveness
from broker.domain.job import Job, JobState
from broker.lifecycle import liveness as life
from broker.lifecycle import transitions as step
from broker.lifecycle.decisions import orphan_decision
from broker.lifecycle.decisions import termination_decision as end
from broker.lifecycle.launch import judge_launching
from broker.lifecycle.observation import proof
from broker.lifecycle.recovery import furthest_first
from broker.lifecycle.state_machine import AttemptEvent
from broker.lifecycle.superseded_checkpoints import superseded
from broker.runtime import clock as database_clock
from broker.store.rules import fences
from tests.sim.loop import EPOCH, WHO
from tests.support.memory_store import state as memory_state
from tests.support.memory_store import store as memory
from tests.support.memory_store import tenant as memory_tenant
from trainer.checkpoint import protocol as checkpoint
from trainer.contract import object_keys as keys
from trainer.contract.documents import ManifestFile
from trainer.contract.object_keys import step_of
from trainer.objectstore import objects as blobs


def always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


# --- creating


async def create_first(self: launch.Launch, leased: list[Any]) -> None:
    """Send the create before the row records the intent."""
    for one in leased:
        if self._intents.may_be_sent(one):
            self._start(one, first=True)
    await _SEND(self, leased)


_SEND = launch.Launch._send


async def fresh_name(self: launch.Launch, one: Any, first: bool) -> None:
    attempt = one.attempt
    name = instance_name(self._context.installation, attempt_id(attempt.job_id, 1000 + attempt.epoch))
    await _CREATE(self, replace(one, attempt=replace(attempt, name=name)), first)


_CREATE = launch.Launch._create


def create_again(attempt: Any, observation: Any, caps: Any, now: datetime) -> AttemptEvent | None:
    return _JUDGE(attempt, observation, caps, now) or (None if observation.listed else AttemptEvent.ABSENT)


def create_unseen(attempt: Any, observation: Any, caps: Any, now: datetime) -> AttemptEvent | None:
    """Treat an attempt as absent if its launcher is dead and the latest listing omits its machine."""
    unseen = observation.dead_s is not None and not observation.listed
    return _JUDGE(attempt, observation, caps, now) or (AttemptEvent.ABSENT if unseen else None)


_JUDGE = judge_launching


# --- proofs


async def through_at_once(self: through.LauncherCompletion, attempt: Any) -> bool:
    return True


async def dead_at_once(self: launchers.CreatesInFlight, attempt: Any) -> float | None:
    key = (attempt.id, attempt.launched_by, False)
    return self._dead_since.setdefault(key, self._context.clock.monotonic())


def one_absence(listings: Any, shows: Any, since: float, lag_s: float, born: float) -> Any:
    return next((listing for listing in listings if listing.begun > since and not shows(listing)), None)


def no_lag(listings: Any, shows: Any, since: float, lag_s: float, born: float) -> Any:
    without = _without(listings, shows, since)
    return without[1] if len(without) >= 2 else None


def first_left_out(listings: Any, shows: Any, since: float, lag_s: float, born: float) -> Any:
    """Charge up to the first listing of the proof, which may have left out a running machine."""
    proven = _PROOF_LISTING(listings, shows, since, lag_s, since)
    return None if proven is None else _without(listings, shows, since)[0]


def second_left_out(listings: Any, shows: Any, since: float, lag_s: float, born: float) -> Any:
    """Charge up to the second listing of the proof, though a new machine may be missing from both."""
    proven = _PROOF_LISTING(listings, shows, since, lag_s, since)
    return None if proven is None else _without(listings, shows, since)[1]


def any_time(listings: Any, shows: Any, since: float, lag_s: float, born: float) -> Any:
    return _PROOF_LISTING(listings, shows, float("-inf"), lag_s, float("-inf"))


def _without(listings: Any, shows: Any, since: float) -> list[Any]:
    """Return the listings in a row, up to now, that do not show it."""
    without: list[Any] = []
    for listing in listings:
        if listing.begun > since:
            without = [] if shows(listing) else [*without, listing]
    return without


_PROOF_LISTING = proof.proof_listing


def left_out_once(listings: Any, name: Any, grown: float) -> bool:
    return bool(listings) and not listings[-1].shows(name)


def give_up(facts: Any, decision: Any, errors: Any, now: datetime) -> Any:
    decided = _AFTER_DESTROY(facts, decision, errors, now)
    failed = decided.attempt.destroy_failures > facts.attempt.destroy_failures
    return end.close_ledger(facts, facts.attempt, image_refused=False) if failed else decided


_AFTER_DESTROY = end.after_destroy


def no_grace(facts: Any) -> Any:
    return _DECIDE_ORPHAN(replace(facts, listed_s=facts.listed_s + 3600))


_DECIDE_ORPHAN = orphan_decision.decide_orphan


# --- life and death


def unknown_is_dead(nodes: int, observation: Any, timeouts: Any) -> Liveness:
    found = _LIVENESS(nodes, observation, timeouts)
    return Liveness.DEAD if found is Liveness.UNKNOWN else found


_LIVENESS = life.liveness


def silent_is_dead(nodes: int, observation: Any, timeouts: Any) -> Liveness:
    age_s = observation.beat_age_s or 0.0
    return Liveness.DEAD if age_s > timeouts.lost_s else _LIVENESS(nodes, observation, timeouts)


def stopped_lives(nodes: int, observation: Any, timeouts: Any) -> Liveness:
    """Treat a stopped machine as one that restarts by itself."""
    if any(o.state is InstanceState.STOPPED for o in observation.listed):
        return Liveness.UNKNOWN
    return _LIVENESS(nodes, observation, timeouts)


def runs(self: Any, name: Any) -> bool:
    """Ignore idle machines, as if they need not be destroyed."""
    return any(o.state in (InstanceState.STARTING, InstanceState.RUNNING) for o in self.by_name.get(name, ()))


async def unreadable_is_silence(self: HeartbeatReader) -> None:
    """Keep the heartbeats of before an outage, and let them age."""
    try:
        await _REFRESH(self)
    except BlobsUnavailable:
        self._listed, self._readable = self._context.clock.monotonic(), True


async def age_by_date(self: HeartbeatReader) -> None:
    """Compare the store's date of a heartbeat with this machine's clock."""
    await _REFRESH(self)
    clock: Any = self._context.clock
    store: Any = self._context.blobs
    now = (clock._host_clock.now() - EPOCH).total_seconds()
    for (attempt, node), watch in self._watched.items():
        watch.changed = clock.monotonic() - max(0.0, now - store.modified(keys.heartbeat(attempt, node)))


_REFRESH = HeartbeatReader.refresh


# --- money


def local_now(self: database_clock.DatabaseClock) -> datetime:
    return self._host_clock.now()


def no_release(*args: Any, **more: Any) -> Any:
    return replace(_CLOSE_LEDGER(*args, **more), ledger=())


_CLOSE_LEDGER = end.close_ledger


def charged_to_the_end(facts: Any, attempt: Any, **more: Any) -> Any:
    """Charge the time of the absence proof too."""
    return _CLOSE_LEDGER(facts, replace(attempt, absent_at=None), **more)


def same_job(job: Any, *args: Any, **more: Any) -> Any:
    return job


def queue_at_once(job: Any, *args: Any, **more: Any) -> Any:
    """Queue a recovering job at once, without the back-off."""
    after = _AFTER_ATTEMPT(job, *args, **more)
    return replace(after, state=JobState.QUEUED) if after.state is JobState.RECOVERING else after


_AFTER_ATTEMPT = step.after_attempt


def charge_twice(self: memory.MemoryStore, charge: Any) -> None:
    _CHARGE(self, charge)
    self._state.write_ledger(fences.entries_of(charge))


_CHARGE = memory.MemoryStore._charge


# --- leases and rows


async def deaf_to_stops(self: Any, job_id: JobId, event: Any) -> Any:
    """Write the request to stop without the signal to the attempt."""
    with patch.object(memory_state.State, "signal", always(None)):
        return await _REQUEST_STOP(self, job_id, event)


_REQUEST_STOP = memory_tenant.MemoryTenant.request_stop


def lease_by_local_clock(self: Any, now: datetime) -> bool:
    process = WHO.get()
    return _CLAIMABLE(self, now + timedelta(seconds=process.skew_s if process else 0.0))


_CLAIMABLE = memory_state.MemoryRow.claimable


def no_lease(self: Any, now: datetime) -> bool:
    return bool(self.due_at <= now) or self.lease_until is not None


async def no_key(self: Any, job: Any, *, key: str | None, body_sha256: str, events: Any) -> Any:
    again = job.id in self._state.jobs
    other = replace(job, id=f"{job.id[:-1]}{len(self._state.jobs) % 10 or 'a'}") if again else job
    return await _SUBMIT(self, other, key=None, body_sha256=body_sha256, events=events)


_SUBMIT = memory_tenant.MemoryTenant.submit


async def answer_first(self: Any, job: Any, **more: Any) -> Any:
    """Write the answer a little later, unless another write comes first."""

    def write() -> None:
        self.later = asyncio.ensure_future(_SUBMIT(self, job, **more))

    asyncio.get_running_loop().call_later(0.5, write)
    return job, True


def admit_twice(self: memory.MemoryStore, attempt: Any, now: datetime) -> None:
    """Admit an attempt twice, as if an answer was lost and the same request was sent again."""
    _ADMIT(self, attempt, now)
    again = attempt_id(attempt.job_id, attempt.number + 1)
    name = instance_name(Installation("test"), again)
    _ADMIT(self, replace(attempt, id=again, number=attempt.number + 1, name=name), now)


_ADMIT = memory.MemoryStore._admit


async def forget_recovering(self: Any, states: Any, **more: Any) -> Any:
    return await _CLAIM_JOBS(self, [state for state in states if state is not JobState.RECOVERING], **more)


_CLAIM_JOBS = memory.MemoryStore.claim_jobs


# --- the blob store


async def no_transaction(self: deadman.Deadman) -> bool:
    self._seq += 1
    await self._context.blobs.put("broker/lease", str(self._seq).encode())
    return False


async def spec_again(self: boot.Boot, attempt: Any, job: Any) -> None:
    spec = attempt_spec(attempt, job, self.context, {})
    await self.context.blobs.put(f"attempts/{attempt.id}/spec.json", spec.model_dump_json().encode())


async def secret_in_spec(self: boot.Boot, attempt: Any, job: Any) -> None:
    spec = attempt_spec(replace(attempt), job, self.context, {})
    with_secret = spec.model_copy(update={"env": await self._secrets(job)})
    await self.context.blobs.put(f"attempts/{attempt.id}/spec.json", with_secret.model_dump_json().encode())


def nearest_first(found: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(keys.manifests(found)))


def all_objects(job: Any, attempts: Any, kept: Any) -> list[str]:
    return [key for objects in kept.by_kind.values() for key in objects]


def one_is_enough(job: Job, *seen: Any) -> tuple[str, ...]:
    """Protect origins only until one commit of the current attempt."""
    checkpoint = job.spec.checkpoint.model_copy(update={"keep": 1})
    return superseded(replace(job, spec=job.spec.model_copy(update={"checkpoint": checkpoint})), *seen)


async def no_protected_job(self: Any, job_id: JobId) -> None:
    """Return no protected job, as if no job started from this one."""


async def anybodys(self: placement.Placement, job: Any) -> tuple[str, ...]:
    """Return the furthest checkpoints of all jobs."""
    return tuple(furthest_first([blob.key for blob in await self._context.blobs.list("checkpoints/")]))


# --- the trainer


async def manifest_first(objects: Any, origin: Any, folder: Any, *, step: int, complete: bool, **more: Any) -> Any:
    target = keys.checkpoint(origin.job, origin.attempt, step, "sealed-first")
    files = [
        ManifestFile(path=path.relative_to(folder).as_posix(), bytes=path.stat().st_size, sha256=sha256)
        for path in sorted(folder.rglob("*"))
        for sha256 in (checkpoint.sha256_of(path),)
    ]
    sealed = await checkpoint._seal(objects, origin, target, files, step=step, complete=complete, began=0.0)
    await checkpoint._send(objects, target, folder, lambda count: None)
    return sealed


async def unverified(self: blobs.Objects, key: str, path: Any, *, size: int, sha256: str) -> None:
    with path.open("wb") as file:
        file.write(await self.read(key) or b"")


async def first_listed(objects: Any, candidates: Sequence[str], folder: Any, **more: Any) -> Any:
    """Return the files of the checkpoint that verified with the step of the first candidate."""
    found = await _RESTORE(objects, candidates, folder, **more)
    return found and (found[0], found[1].model_copy(update={"step": step_of(candidates[0])}))


_RESTORE = checkpoint.restore


async def prune_newest(objects: Any, origin: Any, config: Any, _: Any) -> None:
    for key in (await checkpoint.own_manifests(objects, origin))[: -config.keep]:
        await objects.delete(key)
