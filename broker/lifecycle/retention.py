"""What a job keeps in the blob store: what it costs, and what of it is due to be deleted.

Nothing of a job that is not at rest is ever deleted here (`superseded.py` says what then goes). A deletion is marked
first, so that nobody offers what is on its way out, and within a checkpoint the manifest goes first: without one there
is no checkpoint.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import get_args

from broker.domain.ids import JobId
from broker.domain.job import RESTING_JOB_STATES, Attempt, Job, JobState, StoredData, StoredKind
from broker.domain.money import ZERO, usd
from broker.domain.offer import GIB
from broker.domain.spec import Retention
from broker.lifecycle.recovery import furthest_first
from trainer.contract import object_keys as keys
from trainer.contract.milestones import milestones

KINDS: tuple[StoredKind, ...] = get_args(StoredKind)
RESUMED_FROM: frozenset[StoredKind] = frozenset({"artifacts", "checkpoints"})
"""What another job that starts from this one needs."""
MONTH_S = 730 * 3600
RESTING_S = 6 * 3600.0
"""Between two looks at the objects of a job at rest."""


@dataclass(frozen=True, kw_only=True)
class RetainedObjects:
    """A job's objects by kind: key -> bytes."""

    by_kind: Mapping[StoredKind, Mapping[str, int]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(sum(objects.values()) for objects in self.by_kind.values())


def sort_out(job: Job, attempts: Sequence[Attempt], objects: Iterable[tuple[str, int]]) -> RetainedObjects:
    """`objects`: (key, bytes) below the job's checkpoints and its attempts, and its copy of the data.

    A finished job's last checkpoint holds its results; whatever else an attempt left (its spec, its last word, sealed
    credentials) goes with its logs.
    """
    found: dict[StoredKind, dict[str, int]] = {kind: {} for kind in KINDS}
    results = _results(job, attempts)
    for key, size in objects:
        if key.startswith(keys.checkpoints(job.id)):
            kind: StoredKind = "artifacts" if results and key.startswith(results) else "checkpoints"
        else:
            kind = "data" if key.startswith(keys.JOB_DATA) else "logs"
        found[kind][key] = size
    return RetainedObjects(by_kind=found)


def _results(job: Job, attempts: Sequence[Attempt]) -> str | None:
    """The folder of the results; None while there are none. A machine names it: it is believed below its own only."""
    last = attempts[-1].final if attempts else None
    if job.state is not JobState.SUCCEEDED or last is None or last.checkpoint is None:
        return None
    own = f"{keys.checkpoints(job.id)}{attempts[-1].id}/"
    folder = last.checkpoint.manifest.removesuffix(keys.MANIFEST)
    return folder if folder.startswith(own) and folder != own else None


def last_checkpoint(job: Job) -> StoredKind:
    """What its furthest checkpoint counts as: a finished job's is its results."""
    return "artifacts" if job.state is JobState.SUCCEEDED else "checkpoints"


def origin_deleted(origin: JobId, when: datetime) -> str:
    """Why nothing can start from a job, for people."""
    return f"job {origin} had its checkpoints deleted on {when:%Y-%m-%d}"


def keep_for(job: Job, defaults: Retention, kind: StoredKind) -> timedelta | None:
    """After the job's end; None: for ever."""
    own: float | None = getattr(job.spec.retention, f"{kind}_days")
    days: float | None = getattr(defaults, f"{kind}_days") if own is None else own
    return None if days is None else timedelta(days=days)


def expired(job: Job, defaults: Retention, now: datetime) -> tuple[StoredKind, ...]:
    """Kinds that are due to be marked as deleted."""
    return tuple(kind for kind in KINDS if (at := _ends(job, defaults, kind)) is not None and at <= now)


def _ends(job: Job, defaults: Retention, kind: StoredKind) -> datetime | None:
    """When a kind is due; None: never, not yet known, or deleted already."""
    after = keep_for(job, defaults, kind)
    if job.state not in RESTING_JOB_STATES or job.finished_at is None or kind in job.deleted or after is None:
        return None
    return job.finished_at + after


def leftovers(job: Job, attempts: Sequence[Attempt], kept: RetainedObjects) -> tuple[str, ...]:
    """Keys to delete, in this order: of what is marked, and at rest all but the furthest `checkpoint.keep` checkpoints
    and the milestones, of whichever attempts they are.
    """
    if job.state not in RESTING_JOB_STATES:
        return ()
    doomed = [key for kind in KINDS if kind in job.deleted for key in kept.by_kind.get(kind, ())]
    if "checkpoints" not in job.deleted:
        doomed += _beyond(job, attempts, kept.by_kind.get("checkpoints", ()))
    return manifests_first(doomed)


def manifests_first(doomed: Iterable[str]) -> tuple[str, ...]:
    """The order of deletion."""
    return tuple(sorted(doomed, key=lambda key: (not keys.is_manifest(key), key)))


def newest_rows(attempts: Sequence[Attempt], objects: Iterable[str]) -> set[str]:
    """Manifests of the tokenised rows that a later attempt takes: of each identity the last attempt's, as each one that
    could not fetch them has put a copy.
    """
    number = {str(attempt.id): attempt.number for attempt in attempts}
    found = sorted(keys.rows_manifests(objects), key=lambda key: number.get(key.split("/")[2], 0))
    return {*{keys.rows_identity(key): key for key in found}.values()}


def _beyond(job: Job, attempts: Sequence[Attempt], checkpoints: Iterable[str]) -> list[str]:
    """Of the committed ones the furthest and the milestones stay, and the newest tokenised rows where the job may yet
    go on; what was never committed is of no use to anybody.
    """
    every, config = list(checkpoints), job.spec.checkpoint
    stay = {*furthest_first(every)[: config.keep], *milestones(every, config.keep_every)}
    if job.state is not JobState.SUCCEEDED:
        stay |= newest_rows(attempts, every)
    folders = tuple(manifest.removesuffix(keys.MANIFEST) for manifest in stay)
    return [key for key in every if not key.startswith(folders)] if folders else every


# ----------------------------------------------------------------------------------------------------------- the money


def accrue(known: StoredData | None, kept_bytes: int, usd_per_gib_month: Decimal, now: datetime) -> StoredData:
    """`known` with the time since: for all of it the larger of what lay there before and what lies there now.

    The sum is exact and grows only; it is rounded whenever it is charged, and so each cent once.
    """
    if known is None:
        return StoredData(bytes=kept_bytes, accrued_usd=ZERO, charged_usd=ZERO, to=now)
    lasted = max(ZERO, Decimal(repr((now - known.to).total_seconds())))
    more = usd_per_gib_month * max(known.bytes, kept_bytes) / GIB * lasted / MONTH_S
    total = known.accrued_usd + more
    return StoredData(bytes=kept_bytes, accrued_usd=total, charged_usd=usd(total), to=max(now, known.to))


def due_now(before: StoredData | None, after: StoredData) -> Decimal:
    """Dollars to charge."""
    return after.charged_usd - (before.charged_usd if before else ZERO)


def month_usd(stored_bytes: int, usd_per_gib_month: Decimal) -> Decimal:
    """What so much costs for a month, rounded up."""
    return usd(usd_per_gib_month * stored_bytes / GIB)


def look_again_s(job: Job, left_bytes: int, defaults: Retention, now: datetime, *, live_s: float) -> float | None:
    """Seconds until the next look; None: nothing is left, and nothing will come. `live_s`: while it is not at rest."""
    if job.state not in RESTING_JOB_STATES:
        return live_s
    if not left_bytes and job.deleted.keys() >= set(KINDS):
        return None
    ends = (at for kind in KINDS if (at := _ends(job, defaults, kind)) is not None)
    return max(0.0, min([RESTING_S, *((at - now).total_seconds() for at in ends)]))
